"""One reading of DLIO's: its batches, step by step, and the record of it.

The names of a record's fields are those of ``rayloader.receipt.Receipt`` and, for what only DLIO's
run has, of :func:`record`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from rayloader import Catalog
from rayloader_dlio import kernel, records
from rayloader_dlio.assignment import Share
from rayloader_dlio.session import Session
from rayloader_dlio.settings import record_bytes

Report = Callable[[list[int]], None]
"""Told the sizes of a batch's files, as DLIO's readers tell its tracer [bytes]."""


class Epoch:
    """One reading of training or validation data, from DLIO's first ``next()`` to ``finalize``."""

    def __init__(self, session: Session, train: bool, item: Any, report: Report) -> None:
        """Prepare; nothing is listed, looked up or read before the first ``next()``.

        Args:
            session: whose reader reads.
            train: training, or validation.
            item: what DLIO gets for a batch.
            report: told the sizes of every batch's files.
        """
        self.session = session
        self.train = train
        self._item = item
        self._report = report
        self.number = session.trained + 1 if train else max(session.trained, 1)
        self.steps_yielded = 0
        self.waits: list[float] = []
        """Time that DLIO waited for each step [s]."""
        self.gap_dlio = self.gap_ours = 0.0
        self.excluded_bytes = 0
        self.measure: records.Measure | None = None
        self.share: Share | None = None
        self.hashes: Future[records.Hashed] | None = None
        self.all_hashes: Future[records.Hashed] | None = None
        self.resident: float | None = None
        self.receipt: dict[str, Any] = {}
        self._ended = False

    @property
    def batch_size(self) -> int:
        """DLIO's, of this part [samples]."""
        args = self.session.args
        return int(args.batch_size if self.train else args.batch_size_eval)

    def batches(self) -> Iterator[Any]:
        """DLIO's items, one for each step, each when its files have been read."""
        called = time.perf_counter()
        try:
            yield from self._read(called)
        except Exception as error:
            part = "training" if self.train else "validation"
            error.add_note(f"{part}, DLIO's epoch {self.number}, step {self.steps_yielded + 1}")
            self.session.ranks.abort(error)
            raise
        finally:
            self._leave()

    def account(self) -> None:
        """Write the record of this reading. Idempotent; nothing for one that never began."""
        began = time.perf_counter()
        self._leave()
        if self.measure is not None and not self._ended:
            self._ended = True
            self.measure.device_after = kernel.device_read_bytes(self.session.mount)
            self.receipt = self.session.dataset.receipt.asdict()
            self.session.write(lambda: record(self))
            if self.train:
                self.session.trained += 1
        self.session.spent += time.perf_counter() - began

    def _read(self, called: float) -> Iterator[Any]:
        session = self.session
        self.measure = records.Measure(called)
        number, here = session.begin(self.train)
        self.share = here
        files = Catalog.of_files(here.files)
        if session.settings.storage == "file":
            self.resident = kernel.resident_share(files)
        self.measure.device_before = kernel.device_read_bytes(session.mount)
        session.dataset.set_epoch(number, files, here.reader_steps, here.batch_files)
        incoming = iter(session.dataset)
        excluded_first = int(getattr(session.args, "metric_exclude_start_steps", 0))
        excluded_last = int(getattr(session.args, "metric_exclude_end_steps", 0))
        arrived = 0
        if not here.steps:
            self._hash(files)
        for step in range(here.steps):
            asked = time.perf_counter() if step else called
            if step == excluded_first:
                self._count_excluded()
            needed = step + 1 if here.batches_before is None else int(here.batches_before[step])
            while arrived < needed:
                batch = next(incoming)
                self._report(batch.sizes.tolist())
                arrived += 1
                if step >= max(excluded_first, here.steps - excluded_last):
                    self.excluded_bytes += batch.nbytes
                del batch  # its memory is free for the next one
            if step == here.steps - 1:
                next(incoming, None)  # the reader's account is complete
            now = time.perf_counter()
            self.waits.append(now - asked)
            if step == 0:
                self._begun(called, now, files)
            self.steps_yielded = step + 1
            yield self._item

    def _begun(self, called: float, now: float, files: Catalog) -> None:
        """The first batch is there: the gap before it ends, and there is time for hashes."""
        session = self.session
        if session.left_at is not None:
            self.gap_ours = session.spent + now - called
            self.gap_dlio = max(0.0, now - session.left_at - self.gap_ours)
        self._hash(files)

    def _hash(self, files: Catalog) -> None:
        """Have digests made of what is read, and of what is not."""
        assert self.share is not None
        self.hashes = self.session.hashed(files)
        if self.share.rest:
            self.all_hashes = self.session.hashed(Catalog.of_files(self.share.rest))

    def _count_excluded(self) -> None:
        """What has been read before the first step that DLIO's AU counts [bytes].

        The reader's own count may be a moment old: what has been delivered was read for certain.
        """
        receipt = self.session.dataset.receipt
        self.excluded_bytes = max(receipt.bytes_transferred, receipt.bytes)

    def _leave(self) -> None:
        """DLIO asks for no more."""
        measure = self.measure
        if measure is not None and measure.ended is None:
            measure.end()
            self.session.left_at = measure.ended
            self.session.spent = 0.0


def record(epoch: Epoch) -> dict[str, Any]:
    """Everything that is known of one reading.

    Beside the receipt's own fields: ``part`` (train or valid); ``epoch`` (DLIO's number) and
    ``reading`` (the reader's); ``steps_expected`` and ``steps_yielded``; ``files_assigned``,
    ``files_read``, ``files_remainder``; ``assigned_hash`` and ``assigned_order_hash`` of the files
    that the steps need, as ``read_hash`` and ``order_hash`` are of those read; ``share_hash`` of
    all that DLIO assigned; ``dataset_hash`` of this rank's slice of all files (the ranks' add up);
    ``bytes_nominal`` as DLIO reckons; ``bytes_files``; ``bytes_delivered``;
    ``bytes_in_excluded_steps``: read before the first step that AU counts, or for the last that it
    does not; ``resident_bytes_before`` by a sample; ``device_bytes`` and ``cpu_ray`` of everybody
    on the node, the latter since the record before; times in seconds.
    """
    assert epoch.share is not None
    assert epoch.measure is not None
    return {
        **epoch.receipt,
        **_whose(epoch),
        **_assigned(epoch, epoch.share),
        **_bytes(epoch, epoch.share),
        **_ahead(epoch.session),
        **_place(epoch, epoch.measure),
        **_times(epoch, epoch.measure),
        "options": epoch.session.settings.options.asdict(),
        "env": epoch.session.run.env,
        "versions": epoch.session.run.versions,
    }


def _whose(epoch: Epoch) -> dict[str, Any]:
    launch, run = epoch.session.ranks.launch, epoch.session.run
    return {
        "format": records.FORMAT,
        "run": run.name,
        "part": "train" if epoch.train else "valid",
        "epoch": epoch.number,
        "reading": epoch.receipt["epoch"],
        "rank": launch.rank,
        "world_size": launch.world_size,
        "local_rank": launch.local_rank,
        "local_world_size": launch.local_world_size,
        "host": run.host,
        "pid": os.getpid(),
        "affinity_trainer": sorted(os.sched_getaffinity(0)),
    }


def _assigned(epoch: Epoch, share: Share) -> dict[str, Any]:
    """What DLIO assigned, and what was read of it."""
    read = epoch.hashes.result() if epoch.hashes is not None else records.Hashed()
    rest = epoch.all_hashes.result() if epoch.all_hashes is not None else records.Hashed()
    dataset = epoch.session.slices[epoch.train]
    return {
        "batch_size": epoch.batch_size,
        "num_samples_per_file": int(epoch.session.args.num_samples_per_file),
        "steps_expected": share.steps,
        "steps_yielded": epoch.steps_yielded,
        "files_assigned": len(share.files) + len(share.rest),
        "files_read": epoch.receipt["files"],
        "files_remainder": len(share.rest),
        # The reader has no digests of an epoch without steps.
        "read_hash": epoch.receipt["read_hash"] or f"{0:016x}",
        "order_hash": epoch.receipt["order_hash"] or f"{0:016x}",
        "assigned_hash": f"{read.content:016x}",
        "assigned_order_hash": f"{read.order:016x}",
        "share_hash": f"{(read.content + rest.content) % (1 << 64):016x}",
        "dataset_hash": f"{dataset.content:016x}",
        "dataset_files": dataset.files,
    }


def _bytes(epoch: Epoch, share: Share) -> dict[str, Any]:
    read, deliver = epoch.receipt["bytes"], epoch.session.settings.options.deliver
    record_size, resident = record_bytes(epoch.session.args), epoch.resident
    return {
        "bytes_nominal": share.steps * epoch.batch_size * record_size,
        "bytes_files": read,
        "bytes_delivered": read if deliver else 0,
        "bytes_in_excluded_steps": epoch.excluded_bytes,
        "deliver": deliver,
        "resident_bytes_before": None if resident is None else int(resident * read),
        "resident_sampled_files": kernel.SAMPLED_FILES if resident is not None else 0,
    }


def _ahead(session: Session) -> dict[str, Any]:
    """How much may be read at once and ahead."""
    in_flight = session.settings.options.concurrency * session.ranks.launch.local_world_size
    return {
        "read_ahead_batches_max": session.read_ahead_most(),
        "read_ahead_batches_dlio": session.settings.dlio_read_ahead,
        "node_in_flight_ceiling": in_flight,
    }


def _place(epoch: Epoch, measure: records.Measure) -> dict[str, Any]:
    """Where the data are, and what their device says."""
    session, device = epoch.session, measure.device_bytes
    storage, mount = session.settings.storage, session.mount
    return {
        "storage": storage,
        "fs_type": mount.fs_type if mount else storage,
        "mount_options": mount.options if mount else None,
        "ray_files_apart": session.apart,
        "device_bytes": device,
        "device_bytes_why": None if device is not None else kernel.why_no_device(mount),
    }


def _times(epoch: Epoch, measure: records.Measure) -> dict[str, Any]:
    return {
        "cpu_trainer": measure.cpu,
        "cpu_ray": epoch.session.ray.cpu_seconds(epoch.receipt["reader_pid"]),
        "wall_s": measure.seconds,
        "stall_p50": kernel.percentile(epoch.waits, 0.50),
        "stall_p99": kernel.percentile(epoch.waits, 0.99),
        "gap_dlio_s": epoch.gap_dlio,
        "gap_ours_s": epoch.gap_ours,
    }
