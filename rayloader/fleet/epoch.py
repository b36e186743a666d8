"""One epoch of a Fleet: pieces given to the consumers, cut when the ranks change, and added up.

::

    READING ──ranks change──► CUT: every rank reads to the step that the foremost has begun
       ▲                        │
       └── the rest is given to ┘   the new ranks: each sample is read once
           all ranks anew

A position counts the samples of all ranks (:mod:`rayloader.plan`), so after step n of W ranks
everything before ``start + n * W * B`` has been read and nothing after it.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from rayloader.config import RANK_ANSWER_SECONDS
from rayloader.errors import (
    OptionError,
    RayloaderError,
    ReaderLost,
    UsageError,
    chained,
    counted,
)
from rayloader.experiment.ranks import Moved
from rayloader.fleet.crew import Crew, Member, error_of
from rayloader.fleet.work import Part, Piece, Progress
from rayloader.plan import Shard

ASKED_EVERY = 0.25
"""Time between two questions to each rank how far it is [s]; longer for many ranks."""
ASKED_PER_SECOND = 400
"""Such questions at most, to all ranks together [1/s]."""
ALL = 1 << 62
"""A step that no plan has."""
_SERIALS = itertools.count()
_Result = TypeVar("_Result")


class Watch(Protocol):
    """Who is told how an epoch goes on."""

    def moved(self, rank: int, moved: Moved) -> None:
        """A rank is so far."""

    def said(self, text: str) -> None:
        """Something happened that was not expected."""

    def ranks_changed(self, ranks: int) -> None:
        """So many ranks read now."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What all ranks have read.

    Attributes:
        epoch: which.
        parts: of all ranks, in the order in which they ended.
        seconds: by the driver's clock, from the first word to the last answer [s].
        events: what was not to be expected, a line each.
    """

    epoch: int
    parts: tuple[Part, ...]
    seconds: float
    events: tuple[str, ...]


class Epoch:
    """Leads the consumers through an epoch. :meth:`run` in one thread; the rest from any."""

    def __init__(
        self, crew: Crew, epoch: int, compute_seconds: float, touch: bool, watch: Watch
    ) -> None:
        self._crew = crew
        self._epoch = epoch
        self._compute_seconds = compute_seconds
        self._touch = touch
        self._watch = watch
        self._world = 0
        self._start = 0
        self._stop: int | None = None
        """The step that the running cut ends before, once its ranks are to change."""
        self._pieces: dict[int, Piece] = {}
        self._pending: dict[Any, Member] = {}
        self._progress: dict[int, Progress] = {}
        self._losses: dict[int, tuple[int, int]] = {}
        self._parts: list[Part] = []
        self._events: list[str] = []
        self._failure: BaseException | None = None
        self._asked_at = 0.0
        self._wanted: int | None = None
        self._too_late = False
        """Every step has begun: the ranks change no more."""
        self._settled = threading.Condition()
        self._ended = False

    # From other threads

    def change_ranks(self, ranks: int) -> None:
        """Have so many ranks read on, which must have been started; waits until they do.

        It changes nothing in an epoch that is about to end, and waits until that has ended: the
        ranks that are to go may be reading its last step.
        """
        with self._settled:
            self._wanted = ranks
            while self._wanted == ranks and not self._ended:
                self._settled.wait()

    def stop(self, why: BaseException) -> None:
        """End the epoch where it is; :meth:`run` raises ``why``."""
        self._failure = self._failure or why

    # In its own thread

    def run(self) -> Outcome:
        """Read the epoch.

        Raises:
            RayloaderError: a rank has failed, or the epoch was stopped; the others have ended.
        """
        began = time.perf_counter()
        try:
            self._begin(0, len(self._crew))
            while self._pending:
                self._hear()
                if self._failure is not None:
                    self._give_up()
                    raise self._failure
                if self._wanted is not None and self._stop is None and not self._too_late:
                    self._cut()
                if not self._pending and self._stop is not None:
                    self._go_on()
        finally:
            with self._settled:
                self._ended = True
                self._settled.notify_all()
        seconds = time.perf_counter() - began
        return Outcome(self._epoch, tuple(self._parts), seconds, tuple(self._events))

    def _begin(self, start: int, ranks: int) -> None:
        """Give every rank its piece of what begins at ``start``."""
        self._start, self._world, self._stop = start, ranks, None
        self._progress.clear()
        self._watch.ranks_changed(ranks)
        for member in self._crew.members[:ranks]:
            shard = Shard(member.rank, ranks)
            self._give(
                member,
                Piece(
                    self._epoch,
                    shard,
                    start,
                    compute_seconds=self._compute_seconds,
                    touch=self._touch,
                ),
            )

    def _give(self, member: Member, piece: Piece) -> None:
        piece = dataclasses.replace(piece, serial=next(_SERIALS))
        self._pieces[member.rank] = piece
        self._pending[member.actor.read.remote(piece)] = member

    def _hear(self) -> None:
        """Wait a little for ranks to end, and look how far the others are."""
        import ray

        pause = max(ASKED_EVERY, len(self._pending) / ASKED_PER_SECOND)
        ended, _ = ray.wait(list(self._pending), timeout=pause / 5)
        for answer in ended:
            member = self._pending.pop(answer)
            try:
                part = ray.get(answer)
            except ray.exceptions.RayActorError as lost:
                self._replace(member, lost)
            except ray.exceptions.RayError as failure:
                self._fail(member.rank, error_of(failure))
            else:
                self._ended_well(member, part)
        if time.monotonic() >= self._asked_at + pause:
            self._asked_at = time.monotonic()
            self._ask(list(self._pending.values()))

    def _ended_well(self, member: Member, part: Part) -> None:
        self._parts.append(part)
        self._ask([member])
        restarts = sum(receipt["restarts"] for receipt in part.receipts)
        if restarts:
            times = "once" if restarts == 1 else f"{restarts} times"
            self._happened(f"the reader of rank {member.rank} was started again {times}")

    def _ask(self, members: list[Member]) -> None:
        """Ask consumers how far they are; the dead are found out by their piece."""
        import ray

        asked = {member.actor.progress.remote(): member for member in members}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=1) if asked else ([], 0)
        for answer in answered:
            rank = asked[answer].rank
            try:
                progress, lines = ray.get(answer)
            except ray.exceptions.RayError:
                continue
            for line in lines:
                self._happened(f"rank {rank}: {line}")
            if progress is not None and progress.moved.epoch == self._epoch:
                self._progress[rank] = progress
                self._watch.moved(rank, progress.moved)

    def _replace(self, lost: Member, why: Exception) -> None:
        """Have another consumer go on where the lost one is known to have been."""
        rank, piece = lost.rank, self._pieces[lost.rank]
        known = self._progress.pop(rank, None)
        step, delivered = (known.step, known.delivered) if known else (piece.step, piece.delivered)
        if known is not None and known.part is not None:
            self._parts.append(known.part)
        times, at = self._losses.get(rank, (0, -1))
        times = times + 1 if at == step else 1
        self._losses[rank] = times, step
        limit = self._crew.options.max_restarts
        if times > limit:
            self._fail(
                rank,
                ReaderLost(
                    f"the consumer of rank {rank} is gone again without having got further "
                    f"(max_restarts={limit}): {error_of(why)}"
                ),
            )
            return
        try:
            member = self._crew.replace(lost)
        except RayloaderError as error:
            self._fail(rank, error)
            return
        self._happened(
            f"the consumer of rank {rank} died (process {lost.hello.pid} on {lost.hello.host}); "
            f"process {member.hello.pid} on {member.hello.host} went on from step {step}"
        )
        self._give(
            member, dataclasses.replace(piece, step=step, delivered=delivered, stop=self._stop)
        )

    def _cut(self) -> None:
        """Have all ranks read to the step that the foremost has begun, and no further."""
        members, steps = list(self._pending.values()), self._steps()
        begun = [self._call(member, "cut") for member in members]
        known = [progress.step for progress in self._progress.values()]
        done = [steps] if len(members) < self._world else []  # a rank that has ended has them all
        stop = max([*(steps_ for steps_ in begun if steps_ is not None), *known, *done, 0])
        if stop < steps:
            self._stop = stop
        for member in members:
            self._call(member, "until", stop if stop < steps else ALL)
        self._too_late = stop >= steps

    def _steps(self) -> int:
        """Of each rank in the running cut [batches]."""
        entries, options = len(self._crew.catalog), self._crew.options
        return self._pieces[0].plan(entries, options).steps

    def _call(self, member: Member, name: str, *arguments: Any) -> Any:
        """Call a consumer; ``None`` from a dead one, which its piece will tell."""
        import ray

        serial = self._pieces[member.rank].serial
        called = getattr(member.actor, name).remote(serial, *arguments)
        try:
            return ray.get(called, timeout=RANK_ANSWER_SECONDS)
        except ray.exceptions.RayActorError:
            return None
        except ray.exceptions.RayError as failure:
            raise error_of(failure, f"within {RANK_ANSWER_SECONDS:g} s") from chained(failure)

    def _go_on(self) -> None:
        """Give what is left to the ranks that there are now to be."""
        assert self._stop is not None
        before = self._world
        size = self._crew.options.batch_size
        start = self._start + self._stop * before * size
        ranks = self._wanted or before
        self._begin(start, ranks)
        self._events.append(
            f"{counted(before, 'rank')} became {ranks} after {counted(start, 'sample')}"
        )
        self._changed()

    def _changed(self) -> None:
        with self._settled:
            self._wanted = None
            self._settled.notify_all()

    def _happened(self, text: str) -> None:
        self._events.append(text)
        self._watch.said(text)

    def _fail(self, rank: int, error: RayloaderError) -> None:
        said = [str(error), *getattr(error, "__notes__", [])]
        if self._world > 1 and not any(f"rank {rank}" in text for text in said):
            error.add_note(f"on rank {rank}")
        self._failure = self._failure or error

    def _give_up(self) -> None:
        """Have every rank stop; one that does not, because its storage hangs, is replaced."""
        import ray

        for member in self._pending.values():
            member.actor.until.remote(self._pieces[member.rank].serial, 0)
        waiting = list(self._pending)
        if waiting:
            _, still = ray.wait(waiting, num_returns=len(waiting), timeout=RANK_ANSWER_SECONDS / 3)
            for answer in still:
                self._crew.replace(self._pending[answer])
        self._pending.clear()


class Running(Generic[_Result]):
    """An epoch under way, in a thread of its own, and what is made of its outcome there."""

    def __init__(
        self,
        epoch: Epoch,
        finish: Callable[[Outcome], _Result],
        around: AbstractContextManager[Any],
    ) -> None:
        """Start it, within ``around``."""
        self._epoch = epoch
        self._around = around
        self._finish = finish
        self._result: list[_Result] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rayloader-fleet", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._around:
                outcome = self._epoch.run()
            self._result.append(self._finish(outcome))
        except BaseException as failure:
            self._failure = failure

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        return self._thread.is_alive()

    def change_ranks(self, ranks: int) -> None:
        """See :meth:`Epoch.change_ranks`."""
        self._epoch.change_ranks(ranks)

    def stop(self) -> None:
        """End it where it is, and wait for that; nothing happens when it has ended."""
        self._epoch.stop(UsageError("this epoch was stopped"))
        self._thread.join()

    def result(self) -> _Result:
        """Wait for its end. Ctrl-C stops it.

        Raises:
            RayloaderError: a rank has failed, or it was stopped.
        """
        try:
            while self._thread.is_alive():
                self._thread.join(0.5)
        except BaseException:
            self.stop()
            raise
        if self._failure is not None:
            raise self._failure
        return self._result[0]


def require_ordered(ordered: bool, ranks: int) -> None:
    """An epoch is cut after a step of all ranks, which have no common step out of order.

    Raises:
        OptionError: ``ordered=False``.
    """
    if not ordered:
        raise OptionError(
            f"ranks={ranks}: with ordered=False the ranks change between two epochs only"
        )
