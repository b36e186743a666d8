"""DLIO's interface to a data loader, on rayloader. The only module that imports DLIO and MPI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from dlio_benchmark.common.constants import MODULE_DATA_LOADER, MODULE_DATA_READER
from dlio_benchmark.common.enumerations import DataLoaderType, DatasetType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.utils import utility
from mpi4py import MPI
from torch.utils.data import IterableDataset

from rayloader_dlio.epoch import Epoch
from rayloader_dlio.ranks import ExitWatch
from rayloader_dlio.session import Session, session

_loading = utility.Profile(MODULE_DATA_LOADER)
_reading = utility.Profile(MODULE_DATA_READER)
_enabled = getattr(utility, "DFTRACER_ENABLE", False)
_training = getattr(utility, "dft_ai", None) if _enabled else None
"""The second tracer of DLIO 3, where it traces; where it does not, a call costs it 77 µs."""
_watch = ExitWatch(MPI)
"""From here, when DLIO looks for the class, to the first loader."""


class EpochBatches(IterableDataset[torch.Tensor]):
    """The batches of one part, epoch by epoch: what DLIO's readers yield, when bytes have come.

    DLIO's readers drop what they have read and hand out the same random record for every sample;
    so does this.
    """

    def __init__(self, session: Session, train: bool, batch_size: int) -> None:
        """Batches of ``batch_size`` samples; nothing is read."""
        self._session = session
        self._train = train
        record = torch.from_numpy(np.ascontiguousarray(session.args.resized_image))
        self._item = record.unsqueeze(0).expand(batch_size, *record.shape)
        self.epoch: Epoch | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.account()
        self.epoch = Epoch(self._session, self._train, self._item, _report)
        return self.epoch.batches()

    def account(self) -> None:
        """The last epoch has ended: its record is written, once."""
        if self.epoch is not None:
            self.epoch.account()


class RayDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches read by this rank's one rayloader actor, for training and validation alike.

    The actor is started with the first loader of the process, by all ranks together, and ends with
    the process: ``finalize``, which DLIO calls after every epoch, ends nothing. There is no
    attribute ``_dataset``, by which DLIO would read a batch before the clock.
    """

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        """As DLIO calls it, on every rank, for training and for validation.

        Raises:
            OptionError: what is asked for is not served; the same error on every rank.
        """
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)
        _watch.end()
        train = dataset_type is DatasetType.TRAIN
        self._batches = EpochBatches(session(self._args, MPI), train, self.batch_size)

    def read(self) -> None:
        """Nothing: each epoch's files are known when it begins."""

    def next(self) -> Iterator[torch.Tensor]:
        """The batches of the next epoch; begins at the first one asked for."""
        super().next()
        batches = iter(self._batches)
        if _training is not None:
            batches = _training.dataloader.fetch.iter(batches)
        for step, batch in enumerate(batches, start=1):
            _trace(step=step)
            yield batch
        self.epoch_number += 1
        _trace(epoch=self.epoch_number)

    def finalize(self) -> None:
        """The epoch has ended; the reader stays."""
        self._batches.account()


def _trace(**what: int) -> None:
    _loading.update(**what)
    if _training is not None:
        _training.update(**what)


def _report(sizes: list[int]) -> None:
    """Tell DLIO's tracer of each file, as its readers do."""
    for size in sizes:
        _reading.update(image_size=size)
        if _training is not None:
            _training.update(image_size=size)
