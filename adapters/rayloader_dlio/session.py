"""What one rank keeps for as long as DLIO runs: its one reader, and the account of its epochs.

DLIO makes a loader for training and one for validation, asks each for its batches once an epoch,
and says ``finalize`` after every epoch. The reader outlives all of that: it belongs to the process.

::

    first loader made ──► Session: options checked, ranks agree, Ray and reader started
    loader.next()     ──► Epoch.batches(): the first next() hands the epoch's list to the reader
    loader.finalize() ──► Epoch.account(): one record
    interpreter's end ──► reader closed; a rank that ends too early ends all
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import rayloader
from rayloader import Catalog, OptionError, RankDataset
from rayloader_dlio import assignment, kernel, records
from rayloader_dlio.assignment import Part, Share
from rayloader_dlio.ranks import Ranks
from rayloader_dlio.settings import Settings, record_bytes, settings

FLATTERING_SHARE = 0.05
"""Of an epoch's steps: more read-ahead than this, and DLIO's AU says little of the storage."""

_current: Session | None = None


def session(args: Any, mpi: Any) -> Session:
    """This process's session; made at the first call of a DLIO run, by all ranks together.

    Args:
        args: DLIO's ConfigArguments, one object per run.
        mpi: the module ``mpi4py.MPI``, initialised.

    Raises:
        OptionError: what DLIO or the user asks for is not served; the same on every rank.
        RayloaderError: Ray or a reader could not be started, on this or another rank.
    """
    global _current
    if _current is not None and _current.args is not args:
        _current.close()
        _current = None
    if _current is None:
        _current = Session(args, Ranks(mpi), os.environ)
    return _current


class Session:
    """One rank's reader and what is known of its run."""

    def __init__(self, args: Any, ranks: Ranks, environ: Mapping[str, str]) -> None:
        """Check, agree and start; see :func:`session`."""
        self.args = args
        self.ranks = ranks
        with ranks.together():
            self.settings: Settings = settings(args, environ)
        self._serial = 0
        """Every reading is an epoch of its own for the reader."""
        self._readings = {True: itertools.count(1), False: itertools.count(1)}
        self.trained = 0
        """Training epochs that have ended."""
        self.steps = self._agree_on_steps()
        with ranks.together():
            os.environ.update(self.settings.credentials)
            self.dataset = RankDataset(options=self.settings.options, launch=ranks.launch)
        try:
            with ranks.together(), _apart_from(args.data_folder) as self.apart:
                self.dataset.open()
                self._require_room()
            self._prepare_account(environ)
        except BaseException:
            self.dataset.close()
            rayloader.shutdown()
            raise
        atexit.register(self._at_exit)
        if ranks.rank == 0:
            self._introduce()

    def _prepare_account(self, environ: Mapping[str, str]) -> None:
        """Everything that records need, before the clock."""
        args = self.args
        self._clerk = ThreadPoolExecutor(1, "rayloader-records")
        """Hashes names and writes records while DLIO goes on."""
        self._written: Future[None] | None = None
        self.run = records.Run.of(self.ranks.name, args, environ)
        self.writer = self._open_records()
        self.ray = kernel.RayProcesses()
        self.mount = kernel.mount_of(args.data_folder) if self._reads_files else None
        self.slices = {train: self._hash_slice(train) for train in (True, False)}
        self.shared_out = self._is_shared_out()
        self.left_at: float | None = None
        """When DLIO had its last batch of the reading before, and asked for no more [s]."""
        self.spent = 0.0
        """Of the time since then, what passed in here [s]."""

    def begin(self, train: bool) -> tuple[int, Share]:
        """Begin the next epoch of training or validation, as DLIO has assigned it by now.

        Returns:
            The reader's number of this epoch, and the share.
        """
        part = Part.of(self.args, train, next(self._readings[train]))
        here = assignment.share(
            self.args, part, self.steps[train], self.ranks.size, self.settings.storage
        )
        number = self._serial
        self._serial += 1
        return number, here

    def hashed(self, files: Catalog) -> Future[records.Hashed]:
        """The fingerprint of a list, made in a thread of its own."""
        return self._clerk.submit(records.hashed, files)

    def write(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Have a record made and written.

        Raises:
            OSError: the one before could not be written.
        """
        before, self._written = self._written, None
        if before is not None:
            before.result()
        self._written = self._clerk.submit(lambda: self.writer.write(make()))

    def close(self) -> None:
        """Write what is to be written, end the reader, and leave Ray. Idempotent."""
        atexit.unregister(self._at_exit)
        self._clerk.shutdown()
        self.writer.close()
        self.dataset.close()
        rayloader.shutdown()
        if self._written is not None:
            self._written.result()

    @property
    def _reads_files(self) -> bool:
        return self.settings.storage == "file"

    def _agree_on_steps(self) -> dict[bool, int]:
        """Steps of an epoch of each part, the same on all ranks [batches]."""
        mine = [0, 0]
        with self.ranks.together():
            for place, train in enumerate((True, False)):
                part = Part.of(self.args, train)
                if train or self.args.do_eval:
                    samples = len(self._assigned(part))
                    mine[place] = assignment.steps_here(self.args, part, samples, self.ranks.size)
        train_steps, valid_steps = self.ranks.least(*mine)
        return {True: train_steps, False: valid_steps}

    def _assigned(self, part: Part) -> list[str]:
        return assignment.assigned(self.args, part, self.ranks.size, self.settings.storage)

    def _require_room(self) -> None:
        """The largest possible batch must fit, now and not at some step.

        Raises:
            OptionError: it does not.
        """
        options, needed = self.settings.options, self.settings.largest_batch_bytes
        given = self.dataset.memory_bytes - options.ranges_bytes
        if options.deliver and needed > given:
            raise OptionError(
                f"a batch can take {needed:,} bytes, and a rank here has {given:,} for batches: "
                "set memory_bytes higher where there is memory, have fewer ranks per node, or set "
                "deliver=false (RAYLOADER_DELIVER=false), which reads the same bytes in parts and "
                "drops them in the reader"
            )

    def _open_records(self) -> records.Writer:
        """The file for this rank's records, in rank 0's output folder."""
        folder = self.ranks.from_first(os.path.abspath(str(self.args.output_folder)))
        with self.ranks.together():
            if self.ranks.rank == 0:
                records.remove_old(folder)
        with self.ranks.together():
            writer = records.Writer(folder, self.ranks.rank)
        return writer

    def _is_shared_out(self) -> bool:
        """Whether DLIO gives every training file to one rank, and only to one."""
        if assignment.is_sharded(self.args):
            return True  # its lists are the shares
        paths = self._assigned(Part.of(self.args, True))
        named = list(dict.fromkeys(paths))
        mine = records.hashed(Catalog.of_files(named)) if named else records.Hashed()
        shares = self.ranks.total(mine.content) % (1 << 64)
        return shares == self.ranks.total(self.slices[True].content) % (1 << 64)

    def _hash_slice(self, train: bool) -> records.Hashed:
        """Of all files that DLIO has, this rank's slice: over all ranks, the whole."""
        part = Part.of(self.args, train)
        files = list(part.files)
        if not assignment.is_sharded(self.args):
            files = files[self.ranks.rank :: self.ranks.size]
        storage = self.settings.storage
        named = [assignment.named(path, self.args, storage) for path in files]
        return records.hashed(Catalog.of_files(named)) if named else records.Hashed()

    def _introduce(self) -> None:
        """Say that the adapter is in use: DLIO is silent where it does not find the class."""
        options, launch = self.settings.options, self.ranks.launch
        ahead = "as memory allows" if options.read_ahead_batches is None else (
            f"{options.read_ahead_batches} batches"
        )  # fmt: skip
        told = [f"{name}={getattr(options, name)} ({whence})"
                for name, whence in sorted(self.settings.told.items())]  # fmt: skip
        _say(
            f"rayloader {rayloader.__version__} reads for DLIO: {self.ranks.size} ranks, a reader "
            f"each; {self.steps[True]} steps of {options.batch_size} samples per epoch and rank; "
            f"{options.concurrency} reads in flight per rank, "
            f"{options.concurrency * launch.local_world_size} on this node; "
            f"read-ahead {ahead} (DLIO's own: {self.settings.dlio_read_ahead}); "
            f"memory {self.dataset.memory_bytes:,} bytes per rank; deliver={options.deliver}, "
            f"direct={options.direct}, cpus={options.cpus}, ray={options.ray}; "
            f"set by you: {', '.join(told) or 'nothing'}; receipts: {self.writer.pattern}"
        )
        if self.settings.deeper:
            _say(
                f"rayloader reads ahead deeper than DLIO's own loader would: {ahead}, and not "
                f"{self.settings.dlio_read_ahead} batches"
            )
        if not self.shared_out:
            _say(
                "rayloader: DLIO gives some training files to several ranks and others to none, "
                "and so they are read"
                + (
                    "; data_loader_sampler: index shares them out"
                    if assignment.sampler(self.args) == "iterative"
                    else ""
                )
            )
        most = self.read_ahead_most()
        if most > FLATTERING_SHARE * self.steps[True]:
            _say(
                f"rayloader: up to {most} of {self.steps[True]} steps may be read ahead, more than "
                f"{FLATTERING_SHARE:.0%}: DLIO's AU is flattered by it; take more steps per epoch"
            )

    def read_ahead_most(self) -> int:
        """The most batches that can lie ahead, by their bound and by memory [batches]."""
        options = self.settings.options
        bound = options.read_ahead_batches
        if not options.deliver:
            return self.steps[True] if bound is None else bound
        batch = max(1, record_bytes(self.args) * options.batch_size)
        room = max(1, self.dataset.memory_bytes // batch)
        return room if bound is None else min(bound, room)

    def _at_exit(self) -> None:
        """The interpreter ends: give everything back, or, too early, take the others along."""
        if self.trained < int(self.args.epochs):
            self.ranks.abort_at_exit()
        self.close()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _apart_from(folder: Any) -> Iterator[bool]:
    """Have a private Ray keep its files where the data are not, if there is such a place.

    Yields:
        Whether there is. (Not /dev/shm: a login session that ends may empty it.)
    """
    before = os.environ.get("TMPDIR")
    places = dict.fromkeys([before or "/tmp", "/tmp", "/var/tmp"])
    data = _device(str(folder))
    apart = next((place for place in places if _device(place) not in (data, None)), None)
    if apart is not None:
        os.environ["TMPDIR"] = apart
    try:
        yield apart is not None
    finally:
        if before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = before


def _device(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None
