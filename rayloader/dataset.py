"""The torch face of a rank's reader: :class:`RankDataset` and its :class:`Batch`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from rayloader import launch
from rayloader.catalog import Catalog
from rayloader.channel import Delivery
from rayloader.config import Options
from rayloader.epoch import EpochRun
from rayloader.errors import ClusterError, OptionError, UsageError
from rayloader.launch import Launch
from rayloader.loader import Loader
from rayloader.node import parent_run_id
from rayloader.receipt import Receipt
from rayloader.storage.access import Access
from rayloader.storage.uri import wants_direct


class Batch:
    """Samples of one step: 1-D uint8 tensors that are views of one piece of memory.

    The memory is shared with the reader and goes back to it when the last tensor of the batch is
    dropped. Whoever wants to keep samples for long keeps a :meth:`clone`.

    Not a sequence for torch: a ``DataLoader(dataset, batch_size=None)`` passes it on as it is.

    Attributes:
        sizes: int64 tensor [n], the samples' sizes [bytes].
        epoch: the epoch it belongs to.
        step: its number in the rank's epoch.
    """

    def __init__(
        self,
        data: torch.Tensor,
        places: list[int],
        sizes: list[int],
        names: _Names,
        epoch: int,
        step: int,
    ) -> None:
        """Made by :class:`RankDataset`; ``places[i]`` is where sample i begins in ``data``."""
        self._data = data
        self._places = places
        self._sizes = sizes
        self._names = names
        self.epoch = epoch
        self.step = step

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index``, uint8 [size]; made when asked for.

        Raises:
            IndexError: there is no such sample.
            UsageError: the bytes were dropped in the reader (``deliver=False``).
        """
        place = self._places[index]
        if place < 0:
            raise UsageError("deliver=False: the bytes were read and dropped in the reader")
        return self._data[place : place + self._sizes[index]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Every sample in turn, made in one call where they lie one after the other."""
        if apart := _evenly_apart(self._places, self._sizes):
            shape = len(self), self._sizes[0]
            return iter(self._data.as_strided(shape, (apart, 1), self._places[0]).unbind())
        cut = _cut(self._places, self._sizes, self._data.numel())
        if cut is None:
            return (self[index] for index in range(len(self)))
        lengths, samples = cut
        pieces = self._data.split_with_sizes(lengths)
        return iter([pieces[i] for i in samples])

    def __repr__(self) -> str:
        return (
            f"Batch({len(self)} samples, {self.nbytes:,} bytes, epoch {self.epoch}, "
            f"step {self.step}, {self._data.device})"
        )

    @property
    def sizes(self) -> torch.Tensor:
        """int64 tensor [n]: the samples' sizes [bytes]."""
        return torch.tensor(self._sizes, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all samples together [bytes]."""
        return sum(self._sizes)

    @property
    def keys(self) -> list[str]:
        """The samples' names, relative to the source's root, or as the explicit list has them."""
        return self._names.read()

    def clone(self) -> Batch:
        """A copy in private memory, which the reader does not wait for."""
        return self._moved(self._compact())

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """The batch on a device, in one transfer; this batch itself if it is there already."""
        wanted, here = torch.device(device), self._data.device
        if wanted.type == here.type and wanted.index in (None, here.index):
            return self
        moved = self._compact_source().to(device, non_blocking=non_blocking)
        return self._moved(moved)

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory, one tensor; its share of the arena goes back at once.

        Raises:
            RuntimeError: there is no accelerator to pin for (torch's own error).
        """
        source = self._compact_source()
        pinned = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(source)
        self._places = self._packed_places()
        self._data = pinned
        return self

    def is_pinned(self) -> bool:
        """True in page-locked memory."""
        return self._data.is_pinned()

    def __reduce__(self) -> tuple[Any, ...]:
        packed = self.clone()
        names = _Names.known(self.keys)
        return Batch, (
            packed._data,
            packed._places,
            packed._sizes,
            names,
            self.epoch,
            self.step,
        )

    def _moved(self, data: torch.Tensor) -> Batch:
        return Batch(data, self._packed_places(), self._sizes, self._names, self.epoch, self.step)

    def _packed_places(self) -> list[int]:
        """Where the samples begin in a compact copy."""
        if not self._delivered:
            return self._places
        ends = np.cumsum(self._sizes, dtype=np.int64)
        return [int(end) - size for end, size in zip(ends, self._sizes, strict=True)]

    @property
    def _delivered(self) -> bool:
        return not self._places or self._places[0] >= 0

    def _compact(self) -> torch.Tensor:
        """The samples behind one another in a new tensor."""
        samples = [self[index] for index in range(len(self))] if self._delivered else []
        return torch.cat(samples) if samples else self._data.new_empty(0)

    def _compact_source(self) -> torch.Tensor:
        return self._data if self._packed_places() == self._places else self._compact()


class _Names:
    """A batch's names, looked up when asked for."""

    def __init__(self, catalog: Catalog, entries: np.ndarray) -> None:
        self._catalog: Catalog | None = catalog
        self._entries: np.ndarray | None = entries
        self._read: list[str] | None = None

    @classmethod
    def known(cls, names: list[str]) -> _Names:
        """Names that need no catalog."""
        made = cls.__new__(cls)
        made._catalog = made._entries = None
        made._read = names
        return made

    def read(self) -> list[str]:
        if self._read is None:
            assert self._catalog is not None
            assert self._entries is not None
            self._read = self._catalog.names_at(self._entries)
        return self._read


class RankDataset(IterableDataset[Batch]):
    """One rank's share of a data set, read by a Ray actor that lives as long as training.

    ::

        with rayloader.RankDataset("data/train", batch_size=24, rank=0, world_size=2) as dataset:
            for epoch in range(3):
                dataset.set_epoch(epoch)
                for batch in dataset:
                    ...

    ``iter()`` sends nothing; the first ``next()`` begins the epoch. Every ``for`` is one epoch:
    when it is exhausted, the next one reads the epoch after, unless ``set_epoch`` says otherwise.
    One iterator at a time; a newer one ends the older.

    Args:
        source: a directory, ``s3://bucket/prefix``, a glob, a list of paths or URIs, a
            :class:`~rayloader.Catalog`, a saved catalog; or ``None`` when every epoch brings its
            own list. Credentials for objects come from the environment.
        rank: this process's rank; not given: as the launcher says.
        world_size: number of ranks; given together with ``rank``.
        launch: everything about this rank's place in its run, for callers that know better than
            the environment (an MPI program); instead of ``rank`` and ``world_size``.
        options: the rest; see :class:`~rayloader.Options`.
        **more: single options by name; they win over ``options``.

    Raises:
        OptionError: an unknown option or a bad value.
    """

    def __init__(
        self,
        source: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        launch: Launch | None = None,
        options: Options | None = None,
        **more: Any,
    ) -> None:
        chosen = Options.of({**(options.asdict() if options is not None else {}), **more})
        if launch is None:
            launch = _launched(rank, world_size)
        elif rank is not None or world_size is not None:
            raise OptionError("launch says rank and world_size: give either, not both")
        if wants_direct(source) and not chosen.direct:
            chosen = chosen.replace(direct=True)
        access = Access.found(os.environ, chosen)
        self._loader = Loader(source, chosen, launch, access, _torchs_board)

    def open(self) -> RankDataset:
        """List the source and start the reader now, not at the first batch.

        Raises:
            CatalogError: the source cannot be listed.
            ClusterError: Ray cannot be joined or started.
        """
        _refuse_worker()
        self._loader.open()
        return self

    def close(self) -> None:
        """End the reader; batches that are held stay intact. Idempotent."""
        self._loader.close()

    def __enter__(self) -> RankDataset:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Batches that the next iteration yields."""
        return self._loader.steps

    def __iter__(self) -> Iterator[Batch]:
        _refuse_worker()
        return _Batches(self._loader)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a RankDataset does not travel to another process: its actor is the worker; make it "
            "where it is used, and give a DataLoader num_workers=0"
        )

    def set_epoch(
        self,
        epoch: int,
        files: Sequence[Any] | Catalog | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Say which epoch the next iteration reads; see :meth:`rayloader.loader.Loader.set_epoch`.

        Args:
            epoch: its number; with ``shuffle`` it decides the order.
            files: this rank's own list of paths or URIs, for callers that shard themselves; or
                a :class:`~rayloader.Catalog`, which may have sizes.
            steps: with ``files``, how many batches.
            batch_size: with ``files``, samples per batch where this epoch's differ (validation).
        """
        self._loader.set_epoch(epoch, files, steps, batch_size)

    def reshard(self, rank: int, world_size: int) -> None:
        """Take another place among another number of ranks, between two iterations.

        The reader goes on living. The next iteration begins at its epoch's start, unless a state
        is loaded: any rank's of the old number of ranks continues their epoch on the new one.

        Raises:
            OptionError: unless 0 <= rank < world_size.
            UsageError: an iteration is under way.
        """
        self._loader.reshard(rank, world_size)

    @property
    def concurrency(self) -> int:
        """Ceiling on reads in flight [reads]; may be set while an epoch runs."""
        return self._loader.options.concurrency

    @concurrency.setter
    def concurrency(self, concurrency: int) -> None:
        self._loader.set_concurrency(concurrency)

    @property
    def options(self) -> Options:
        """The options in force."""
        return self._loader.options

    @property
    def memory_bytes(self) -> int:
        """The bound on batches in memory that is in force [bytes]; known once it is open."""
        return self._loader.memory_bytes

    @property
    def rank(self) -> int:
        """This rank."""
        return self._loader.shard.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._loader.shard.world_size

    @property
    def catalog(self) -> Catalog | None:
        """What exists; ``None`` when every epoch brings its own list."""
        return self._loader.catalog

    @property
    def receipt(self) -> Receipt:
        """What the running epoch has really read so far, or the last one did."""
        return self._loader.receipt

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values (StatefulDataLoader's convention)."""
        return self._loader.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, with this or another number of ranks.

        Raises:
            StateMismatch: it belongs to another catalog, seed or list, and says which.
        """
        self._loader.load_state(state)


def _evenly_apart(places: list[int], sizes: list[int]) -> int:
    """How far apart samples of one size lie that have gaps between them [bytes]; 0: otherwise."""
    if len(places) < 2 or places[0] < 0 or sizes.count(sizes[0]) < len(sizes):
        return 0
    apart = places[1] - places[0]
    even = places == list(range(places[0], places[0] + apart * len(places), apart or 1))
    return apart if even and apart > sizes[0] else 0


def _cut(places: list[int], sizes: list[int], length: int) -> tuple[list[int], list[int]] | None:
    """How to cut ``length`` bytes so that each sample is a piece.

    Returns:
        The lengths of all pieces, and which of them are the samples; what lies between two is a
        piece too. ``None`` where the samples do not lie in their order.
    """
    lengths: list[int] = []
    samples: list[int] = []
    end = 0
    for place, size in zip(places, sizes, strict=True):
        if place > end:
            lengths.append(place - end)
        elif place < end:
            return None
        samples.append(len(lengths))
        lengths.append(size)
        end = place + size
    return [*lengths, length - end], samples


class _Batches(Iterator[Batch]):
    """One iteration. It keeps no batch: what the trainer drops is free at once."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._run: EpochRun | None = None
        self._ended = False

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        try:
            if self._run is None:
                self._run = self._loader.begin()
            delivery = self._loader.receive(self._run)
        except BaseException:
            self._ended = True
            raise
        if delivery is None:
            self._ended = True
            raise StopIteration
        return _batch(delivery, self._run.names, self._run.epoch)

    def __del__(self) -> None:
        if self._run is not None and not self._ended:
            self._loader.leave(self._run)


def _batch(delivery: Delivery, names: Catalog | None, epoch: int) -> Batch:
    assert names is not None
    data = torch.from_numpy(delivery.data)
    places, sizes, entries = delivery.table.T
    return Batch(
        data, places.tolist(), sizes.tolist(), _Names(names, entries), epoch, delivery.step
    )


def _refuse_worker() -> None:
    if get_worker_info() is not None:
        raise UsageError(
            "RankDataset inside a DataLoader worker: its actor is the worker; use "
            "DataLoader(dataset, batch_size=None, num_workers=0) or iterate over it directly"
        )


def _launched(rank: int | None, world_size: int | None) -> Launch:
    """Who this process is: as given, as torch.distributed or Ray Train say, or as launched."""
    if (rank is None) != (world_size is None):
        raise OptionError("rank and world_size go together: give both, or neither")
    try:
        found = launch.detect(os.environ)
    except OptionError:  # what the caller says is enough
        if rank is None:
            raise
        found = launch.detect({})
    if found.run_id is None and found.launcher != "single":
        # MPICH and Intel MPI name no run; the ranks of a node have their launcher in common.
        found = dataclasses.replace(found, run_id=parent_run_id())
    if rank is not None and world_size is not None:
        return dataclasses.replace(found, rank=rank, world_size=world_size)
    known = _from_torch_distributed()
    if known is None and found.launcher == "single":
        known = _from_ray_train()
    if known is None:
        return found
    rank, world_size = known
    found = dataclasses.replace(found, rank=rank, world_size=world_size)
    if found.launcher == "single" and world_size > 1 and found.run_id is None:
        # Spawned by hand (torch.multiprocessing): ranks of one node have one parent.
        return dataclasses.replace(found, run_id=parent_run_id(), local_world_size=world_size)
    return found


class _TorchsBoard:
    """The key-value store of torch.distributed, which all ranks of the run reach.

    No collective: a rank that opens later, or never, holds nobody up.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def first_said(self, name: str, value: str) -> str:
        """What the first of all ranks said under ``name``."""
        with _told_of_torch():
            said: bytes = self._store.compare_set(_key(name), "", value)
            return said.decode()

    def said(self, name: str) -> str | None:
        """What was said under ``name``; ``None``: nothing yet."""
        with _told_of_torch():
            if not self._store.check([_key(name)]):
                return None
            said: bytes = self._store.get(_key(name))
            return said.decode()


def _key(name: str) -> str:
    """Torch's store takes no file names that are not UTF-8."""
    return f"rayloader/{hashlib.sha256(os.fsencode(name)).hexdigest()}"


@contextlib.contextmanager
def _told_of_torch() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError is one
        why = str(error).partition("\n")[0]
        raise ClusterError(f"the store of torch.distributed does not answer: {why}") from error


def _torchs_board() -> _TorchsBoard | None:
    if _from_torch_distributed() is None:
        return None
    # There is no public way to it; without it ranks are compared within their Ray only.
    found = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return _TorchsBoard(found()) if found is not None else None


def _from_torch_distributed() -> tuple[int, int] | None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _from_ray_train() -> tuple[int, int] | None:
    if "ray.train" not in sys.modules:
        return None
    import ray.train

    try:
        context = ray.train.get_context()
        return context.get_world_rank(), context.get_world_size()
    except RuntimeError:
        return None


def _refuse_to_collate(batches: object, *, collate_fn_map: object = None) -> NoReturn:
    raise UsageError(
        "a RankDataset makes the batches itself: DataLoader(dataset, batch_size=None), and "
        "RankDataset(..., batch_size=...) for their size"
    )


default_collate_fn_map[Batch] = _refuse_to_collate  # else torch's TypeError, which says nothing
