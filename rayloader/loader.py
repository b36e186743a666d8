"""What one rank holds: it opens, restarts and closes the reader. Recovery lives here, once.

::

    NEW ──open()──► OPEN ──close()──► CLOSED

Every epoch is a :class:`Request` that states its whole position, so a reader needs no memory:
when one dies, the next one is given the same arena, told what is still held, and asked for the
rest.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

from rayloader import cluster
from rayloader.catalog import Catalog
from rayloader.channel import Delivery, ReaderGone
from rayloader.checksums import Checksums
from rayloader.config import LISTING_SECONDS, Options
from rayloader.epoch import EpochRun
from rayloader.errors import (
    CatalogMismatch,
    OptionError,
    RayloaderError,
    ReaderLost,
    StateMismatch,
    UsageError,
)
from rayloader.launch import Launch
from rayloader.plan import Shard
from rayloader.position import Position, Share
from rayloader.reader import Ended, Warned
from rayloader.receipt import Receipt
from rayloader.remote import RemoteReader
from rayloader.storage.access import Access
from rayloader.storage.uri import is_object, wants_direct
from rayloader.tally import Tally

log = logging.getLogger("rayloader")

_DIGEST_BYTES = 64
"""More than a digest has letters [bytes]."""
_NUMBERS = itertools.count()
"""Of the data sets that this process shares with other ranks, which make them in the same order."""


class Board(Protocol):
    """Where ranks leave words for each other; nobody waits for anybody."""

    def first_said(self, name: str, value: str) -> str:
        """What the first of all ranks said under ``name``; ``value`` if it is this one."""
        ...

    def said(self, name: str) -> str | None:
        """What was said under ``name``; ``None``: nothing yet."""
        ...


class _State(enum.Enum):
    NEW = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Loader:
    """The reader of one rank, seen from its trainer."""

    def __init__(
        self,
        source: Any,
        options: Options,
        launch: Launch,
        access: Access | None = None,
        board: Callable[[], Board | None] = lambda: None,
    ) -> None:
        """Read ``source`` as rank ``launch.rank`` of ``launch.world_size``; acts on ``open``.

        Args:
            source: what to read, or ``None`` when every epoch brings its own list.
            options: how.
            launch: this rank's place in its run.
            access: where objects are, and who asks.
            board: asked at ``open`` for what connects all ranks, beside the Ray that they share.
        """
        self.source = source
        self.options = options
        self.launch = launch
        self._access = access if access is not None else Access()
        self.shard = Shard(launch.rank, launch.world_size)
        self._number = next(_NUMBERS) if launch.world_size > 1 else 0
        self._state = _State.NEW
        self._next = Position()
        """What the next iteration reads."""
        self._left: Position | None = None
        """Where an unfinished iteration was left; iterating again begins the epoch anew."""
        self._moves = 0
        """How often the user has said what to read next."""
        self._run: EpochRun | None = None
        self._last_receipt = Receipt()
        self._ended_at: float | None = None
        self._catalog: Catalog | None = None
        self._shared: list[str] = []
        """What this rank holds of its node's guardian, by name."""
        self._board = board
        self._questions: list[tuple[Board, str]] = []
        """Where and under which name ranks compare catalogs, until the first epoch begins."""
        self._listing_ops = 0
        """Made to list the source, and not yet on a receipt [operations]."""
        self._remote: RemoteReader | None = None
        self._generation = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()

    # Life

    def open(self) -> None:
        """List the source, join Ray and start the reader. Idempotent.

        Raises:
            CatalogError: the source cannot be listed, or other ranks see another one.
            ClusterError: Ray cannot be joined or started.
            ReaderLost: the reader does not come up, or dies doing so more than ``max_restarts``
                times.
        """
        self._require_this_process()
        with self._lock:
            if self._state is _State.CLOSED:
                raise UsageError("this data set is closed; make a new one")
            if self._state is _State.NEW:
                remote = RemoteReader(self.options, self.launch, self.catalog, self._known_access())
                try:
                    self._start(remote)
                    self._compare_catalogs()
                except BaseException:
                    remote.close()
                    raise
                self._remote = remote
                self._state = _State.OPEN

    def close(self) -> None:
        """End the reader. Batches that are held stay intact. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._state = _State.CLOSED
            if self._run is not None:
                self._leave(self._run)
            remote, self._remote = self._remote, None
            if remote is not None:
                remote.close()
            while self._shared:
                cluster.guardian(self.launch.run_id).forget(self._shared.pop())

    # What is read

    @property
    def catalog(self) -> Catalog | None:
        """What exists, listed at the first call; ``None`` when every epoch brings its own list."""
        with self._lock:
            if self._catalog is None and self.source is not None:
                self._catalog = self._require_checksums(self._list())
            return self._catalog

    def set_epoch(
        self,
        epoch: SupportsIndex,
        files: Sequence[Any] | Catalog | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Say which epoch the next iteration reads; a running one goes on.

        The epoch of a loaded state keeps its position; any other begins at its start.

        Args:
            epoch: number of the epoch, >= 0; it decides the order.
            files: this rank's own list, in order, or a catalog of it; it is not sharded or
                shuffled. Sizes that it lacks are taken from the source's listing, if that has them.
            steps: with ``files``, the number of batches: a longer list is cut, a shorter one is
                an error, or padded under ``uneven="pad"``.
            batch_size: with ``files``, samples per batch of this epoch; not given: the option's.
                A state saved inside such an epoch resumes with that size as the option.

        Raises:
            OptionError: ``steps`` or ``batch_size`` without ``files``, or a list too short.
            StateMismatch: the list is not the one that the loaded state was saved with.
        """
        number = -1 if isinstance(epoch, bool | float | str) else operator.index(epoch)
        if number < 0:
            raise OptionError(f"epoch={epoch!r}: must be a whole number >= 0")
        for name, given in (("steps", steps), ("batch_size", batch_size)):
            if files is None and given is not None:
                raise OptionError(
                    f"{name}={given} goes with files=[...]: a catalog decides its own steps"
                )
        listed = None if files is None else self._listed(files)
        self._move(self._share.moved(self._next, number, listed, steps, batch_size))

    def _listed(self, files: Sequence[Any] | Catalog) -> Catalog:
        """An epoch's own list, with the sizes that the source's listing has of its objects."""
        if wants_direct(files) and not self.options.direct:
            raise OptionError("direct:// asks for O_DIRECT: make the data set with direct=True")
        listed = files if isinstance(files, Catalog) else Catalog.of_files(files)
        self._require_checksums(listed)
        if not is_object(listed.root) or self.catalog is None:
            return listed
        return listed.sized_by(self.catalog)

    @property
    def steps(self) -> int:
        """Batches that the next iteration yields."""
        at = self._next
        self._require_list(at)
        return self._share.plan(at).steps - at.step - len(at.delivered)

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight, now and for readers started later [reads]."""
        self.options = self.options.replace(concurrency=concurrency)
        if self._remote is not None:
            self._remote.set_concurrency(self.options)

    def reshard(self, rank: int, world_size: int) -> None:
        """Take another place among another number of ranks; the reader goes on living.

        What the next iteration reads begins at its epoch's start. A list of the caller's own is
        kept: it does not depend on the ranks.

        Raises:
            OptionError: unless 0 <= rank < world_size.
            UsageError: an iteration is under way.
        """
        shard = Shard(rank, world_size)
        with self._lock:
            if self._run is not None:
                raise UsageError("reshard: end the iteration that is under way first")
            self.shard = shard
            self._move(self._next.anew())

    @property
    def memory_bytes(self) -> int:
        """The bound on batches in memory that is in force, once a reader has been started."""
        remote = self._remote
        return remote.memory_bytes if remote is not None else self.options.memory_bytes

    @property
    def receipt(self) -> Receipt:
        """What the running epoch has read so far, or the last one did."""
        run = self._run
        if run is None:
            return self._last_receipt
        self._update(run)
        return run.receipt

    # Position

    def state(self) -> dict[str, Any]:
        """The position, as plain values; any rank's resumes all ranks when saved at one step."""
        run = self._run
        return self._share.state(run.rest() if run is not None else self._left or self._next)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, with this or another number of ranks.

        Raises:
            StateMismatch: it belongs to another catalog, seed, order or version, and says which;
                or it is no state at all. The position stays what it was.
        """
        at = self._share.position(state)
        if self._run is not None:
            self._leave(self._run)
        self._move(at)

    # What an iteration does

    def begin(self) -> EpochRun:
        """Begin the next epoch: its clock starts here. An unfinished one ends."""
        self.open()
        with self._lock:
            if self._run is not None:
                self._leave(self._run)
            self._hear_complaints()
            at = self._next
            self._require_list(at)
            run = EpochRun(at, self._share.plan(at), self.catalog, self.shard, self.options)
            run.gap_from = self._ended_at
            run.listing_ops, self._listing_ops = self._listing_ops, 0
            run.moves = self._moves
            # What an iteration began is not begun again by the next one.
            self._next, self._left = at.anew(), None
            self._run = run
        try:
            self._request(run)
        except ReaderGone as gone:  # it died between two epochs
            self._restart(run, gone)
        return run

    def receive(self, run: EpochRun) -> Delivery | None:
        """The next batch, or ``None`` at the end; restarts the reader where that is needed.

        Raises:
            UsageError: the run was ended by a newer one, by ``close`` or by ``load_state``.
        """
        called = time.perf_counter()
        delivery, errors = None, 0
        try:
            delivery = self._wait(run)
        except BaseException as why:  # a failure, or Ctrl-C
            errors = int(run is self._run and isinstance(why, RayloaderError))
            self._leave(run)
            raise
        finally:
            waited = time.perf_counter() - called
            run.waited(waited)
            self._tell(_tally(delivery, waited, errors))
        if delivery is None:
            self._finish(run)
            if run.moves == self._moves:
                self._next = Position(run.epoch + 1)
        else:
            run.delivered(delivery)
        return delivery

    def leave(self, run: EpochRun) -> None:
        """The trainer will ask this run for nothing more."""
        if run is self._run:
            self._leave(run)

    # Inside

    def _start(self, remote: RemoteReader) -> None:
        """Start the first reader; one that dies meanwhile is replaced like any other."""
        try:
            remote.start()
        except ReaderGone as gone:
            for _ in range(self.options.max_restarts):
                self._mourn(remote, gone)
                try:
                    remote.restart()
                except ReaderGone as again:
                    gone = again
                else:
                    return
            raise ReaderLost(
                f"the reader of rank {self.shard.rank} does not come up "
                f"(max_restarts={self.options.max_restarts}): {gone}"
            ) from gone

    def _mourn(self, remote: RemoteReader, gone: ReaderGone) -> None:
        why = remote.why_gone(gone)
        log.warning("reader of rank %d is gone (%s); starting another", self.shard.rank, why)

    @property
    def _share(self) -> Share:
        return Share(self.catalog, self.shard, self.options)

    def _move(self, at: Position) -> None:
        self._next, self._left = at, None
        self._moves += 1

    def _list(self) -> Catalog:
        """List the source; of the ranks on a node one does, and all share what it found."""

        def listed() -> Catalog:
            catalog = Catalog.from_source(
                self.source, access=self._access, etags=self.options.verify
            )
            self._listing_ops = catalog.metadata_ops
            return catalog

        launch = self.launch
        is_path = isinstance(self.source, str | bytes | os.PathLike)
        if not is_path or launch.run_id is None or launch.local_world_size == 1:
            return listed()
        name = self._shared_name()
        with self._made_once(name, lambda: listed().to_fd()) as fd:
            catalog = Catalog.from_fd(fd)
        if not catalog.knows_digest:  # a saved one, of which every rank would read all names
            with self._made_once(f"digest of {name}", lambda: _memfd(catalog.digest)) as fd:
                catalog.with_digest(os.pread(fd, _DIGEST_BYTES, 0).decode())
        return catalog

    @contextlib.contextmanager
    def _made_once(self, name: str, make: Callable[[], int]) -> Iterator[int]:
        """A descriptor that one rank of the node makes for all; see :meth:`Guardian.shared`."""
        guardian = cluster.guardian(self.launch.run_id, timeout=self.options.start_timeout)
        fd = guardian.shared(name, make, LISTING_SECONDS)
        self._shared.append(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def _require_checksums(self, catalog: Catalog) -> Catalog:
        """With ``verify``, what is read must have something to be compared with.

        Raises:
            OptionError: it has not.
        """
        if self.options.verify:
            Checksums(catalog)
        return catalog

    def _known_access(self) -> Access:
        """How the reader gets at objects; with a warning where nobody said where they are."""
        catalog = self.catalog
        if catalog is None or not is_object(catalog.root):
            return self._access
        if catalog.root.startswith(b"s3:"):
            self._access = self._access.with_keys()
            if self._access.is_guessed and self.launch.local_rank == 0:
                log.warning("%s", self._access.warning)
        return self._access

    def _compare_catalogs(self) -> None:
        """All ranks that a Ray or a board connects must see the same names.

        Ranks on several nodes that each have a private Ray, and no board, cannot know of each
        other.
        """
        catalog, run_id = self.catalog, self.launch.run_id
        if catalog is None or self.shard.world_size == 1:
            return
        name, questions = self._shared_name(), list[tuple[Board, str]]()
        if run_id is not None:
            questions.append((cluster, f"{run_id}/{name}"))
        if (board := self._board()) is not None:
            questions.append((board, name))
        for where, question in questions:
            self._compare_digests(catalog, where, question)
        self._questions = questions

    def _compare_digests(self, catalog: Catalog, board: Board, question: str) -> None:
        first = board.first_said(question, catalog.digest)
        if first != catalog.digest:
            complaint = (
                f"rank {self.shard.rank} sees another catalog (digest {catalog.digest}, "
                f"{len(catalog):,} entries) than the first rank of this run (digest {first}): "
                f"every rank must list the same names"
            )
            board.first_said(f"{question}/mismatch", complaint)
            raise CatalogMismatch(complaint)

    def _hear_complaints(self) -> None:
        """A rank that opened later may have seen another catalog: all ranks must end, or none."""
        questions, self._questions = self._questions, []
        for board, question in questions:
            if (complaint := board.said(f"{question}/mismatch")) is not None:
                raise CatalogMismatch(complaint)

    def _shared_name(self) -> str:
        """What the ranks of a run call this data set; paths tell apart what came out of step."""
        source = self.source
        path = isinstance(source, str | bytes | os.PathLike)
        place = "(a list)"
        if path:
            name = os.fsencode(source)
            place = os.fsdecode(name if is_object(name) else os.path.abspath(name))
        return f"catalog {self._number} {place}"

    def _request(self, run: EpochRun) -> None:
        remote = self._require_current(run)
        self._generation += 1
        run.generation = self._generation
        remote.begin(run.request(self._generation, self.shard.rank), run.at.files)

    def _wait(self, run: EpochRun) -> Delivery | None:
        while True:
            remote = self._require_current(run)
            try:
                outcome = remote.receive()
            except ReaderGone as gone:
                self._restart(run, gone)
                continue
            if isinstance(outcome, Warned):
                log.warning("%s (rank %d, epoch %d)", outcome.text, self.shard.rank, run.epoch)
            elif isinstance(outcome, Ended):
                return None
            else:
                run.restarts_in_a_row = 0
                return outcome

    def _restart(self, run: EpochRun, gone: ReaderGone) -> None:
        """Start another reader where the last one left off."""
        while True:
            with self._lock:
                remote = self._require_current(run)
                run.restarts_in_a_row += 1
                if run.restarts_in_a_row > self.options.max_restarts:
                    self._leave(run)
                    raise ReaderLost(
                        f"the reader of rank {self.shard.rank} is gone again without having "
                        f"delivered a batch (max_restarts={self.options.max_restarts}): "
                        f"{remote.why_gone(gone)}"
                    ) from gone
                self._mourn(remote, gone)
                run.reader_gone(remote.counts())
                self._tell(Tally(restarts=1))
                try:
                    remote.restart()
                    self._request(run)
                except ReaderGone as again:
                    gone = again
                else:
                    return

    def _tell(self, tally: Tally) -> None:
        if self._remote is not None and os.getpid() == self._pid:
            self._remote.tell(tally)

    def _leave(self, run: EpochRun) -> None:
        """The epoch is left unfinished: its position stays known, its read-ahead is dropped."""
        if run is not self._run:
            return
        self._finish(run)
        if run.moves == self._moves:
            self._left = run.rest()
        if self._remote is not None and os.getpid() == self._pid:
            self._generation += 1
            with contextlib.suppress(ReaderGone):
                self._remote.abandon(self._generation)

    def _finish(self, run: EpochRun) -> None:
        run.ended_at = self._ended_at = time.perf_counter()
        self._update(run)
        self._last_receipt = run.receipt
        self._run = None

    def _update(self, run: EpochRun) -> None:
        if self._remote is not None:
            run.update(self._remote.counts(), self._remote)

    def _require_current(self, run: EpochRun) -> RemoteReader:
        self._require_this_process()
        if run is not self._run or self._remote is None:
            raise UsageError(
                "this iterator has ended: the data set was closed or given another state, or a "
                "newer iterator began"
            )
        return self._remote

    def _require_list(self, at: Position) -> None:
        if at.awaits_list:
            raise StateMismatch(
                f"the loaded state was saved with an explicit list for epoch {at.epoch}: "
                f"call set_epoch({at.epoch}, files=[...]) with it first"
            )

    def _require_this_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this data set was opened in another process; a forked child cannot read from it"
            )


def _memfd(text: str) -> int:
    """A descriptor of a few letters."""
    fd = os.memfd_create("rayloader-digest", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    return fd


def _tally(delivery: Delivery | None, waited: float, errors: int) -> Tally:
    """What one call of ``next()`` was, in numbers."""
    stall_ns = int(waited * 1e9)
    if delivery is None:
        return Tally(stall_ns, errors=errors)
    return Tally(stall_ns, 1, len(delivery.table), delivery.nbytes, len(delivery.skipped))
