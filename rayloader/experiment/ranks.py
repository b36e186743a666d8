"""The rank processes of ``rayloader read``: started together, begun together, ended together.

::

    rank → driver   Ready(0) … First(0), Moved(0) …, Done(0), Ready(1) …, end of file
    driver → rank   Task, then Go(0), Go(1) … once every rank is ready

Either side may find the pipe closed: then the other is gone. A rank also dies with its driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, BinaryIO, Literal, TypeAlias, cast

import rayloader
from rayloader.config import RANK_END_SECONDS, RANK_LEAVE_SECONDS, Options
from rayloader.errors import ClusterUnreachable, RayloaderError
from rayloader.launch import RUN_ID, scrubbed

Loader: TypeAlias = Literal["rayloader", "torch-kept", "torch-respawned", "torch-in-process"]

THREADS = "OMP_NUM_THREADS"
"""Of torch: unless the user says otherwise, all ranks together have a thread per CPU."""
_STDERR_TAIL = 1500
"""Characters of a rank's own output that are shown when it dies without a word [characters]."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a rank process is told first.

    Attributes:
        loader: what reads.
        rank: 0 <= rank < ranks.
        ranks: how many there are.
        epochs: how many to read, from epoch 0.
        options: of the reader; a peer takes from them what it has.
        touch: look at every byte that is delivered.
        compute_seconds: the training step that is imitated, per batch [s].
        workers: of torch's DataLoader.
        worker_start: how these are started; ``None``: torch's own choice.
        driver: the process that sends this.
    """

    loader: Loader
    rank: int
    ranks: int
    epochs: int
    options: Options
    touch: bool = False
    compute_seconds: float = 0.0
    workers: int = 2
    worker_start: str | None = None
    driver: int = 0


@dataclasses.dataclass(frozen=True)
class Ready:
    """This rank could begin the epoch now."""

    epoch: int


@dataclasses.dataclass(frozen=True)
class Go:
    """Begin the epoch."""

    epoch: int


@dataclasses.dataclass(frozen=True)
class First:
    """This rank has its first batch."""

    epoch: int


@dataclasses.dataclass(frozen=True)
class Moved:
    """How far this rank is.

    Attributes:
        epoch: its epoch.
        steps: batches delivered [batches].
        steps_expected: batches of the epoch [batches].
        files: samples delivered [samples].
        bytes: bytes delivered [bytes].
        read_seconds: duration of all reads so far, added up [s]; its growth per second is the
            number of reads in flight.
    """

    epoch: int
    steps: int
    steps_expected: int
    files: int
    bytes: int
    read_seconds: float


@dataclasses.dataclass(frozen=True)
class Done:
    """This rank has read its epoch.

    Attributes:
        epoch: its epoch.
        first_at: when it had its first batch, on the node's monotonic clock [s].
        ended_at: when it had the last one and the iterator had ended [s].
        receipt: ``Receipt.asdict()``, or of a peer the fields that it can fill.
    """

    epoch: int
    first_at: float
    ended_at: float
    receipt: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Said:
    """A line of a rank's log, from WARNING on."""

    level: int
    text: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """A rank has failed; it is about to end.

    Attributes:
        error: rayloader's own error, or what a foreign one said.
        traceback: the rank's, for those who debug.
    """

    error: RayloaderError
    traceback: str


FromRank: TypeAlias = Ready | First | Moved | Done | Said | Failed


class RankProcesses:
    """All ranks of one loader. Use as a context: leaving it ends them, however it is left."""

    def __init__(self, tasks: list[Task], catalog_fd: int, run_id: str) -> None:
        """Start one process per task; each maps the catalog behind ``catalog_fd``."""
        self._ranks: list[_Rank] = []
        try:
            for task in tasks:
                self._ranks.append(_start(task, catalog_fd, run_id))
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def go(self, epoch: int) -> float:
        """Have every rank begin an epoch; the moment before the first was told [s]."""
        now = time.perf_counter()
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.link.send(Go(epoch))
        return now

    def messages(self) -> Iterator[tuple[int, FromRank]]:
        """Yield what the ranks say, with the rank that said it, until all have closed the pipe.

        Raises:
            RayloaderError: a rank has failed: its error, with the rank in a note.
        """
        running = list(self._ranks)
        while running:
            ready = set(wait([end for rank in running for end in (rank.link, rank.life)]))
            for rank in [rank for rank in running if {rank.link, rank.life} & ready]:
                while (message := rank.next()) is not None:
                    if isinstance(message, Failed):
                        raise self._error(rank.number, message)
                    yield rank.number, message
                if rank.closed or rank.life in ready:
                    rank.require_clean_end()
                    running.remove(rank)

    def _error(self, rank: int, failed: Failed) -> RayloaderError:
        error = failed.error
        said = [str(error), *getattr(error, "__notes__", [])]
        # All ranks are here, and a Ray that cannot be reached is so for each of them.
        common = isinstance(error, ClusterUnreachable)
        named = common or any(f"rank {rank}" in text for text in said)
        if len(self._ranks) > 1 and not named:
            error.add_note(f"on rank {rank}")
        error.__cause__ = RankTraceback(failed.traceback)
        return error

    def end(self) -> None:
        """End every process that still runs: asked to at first, later killed."""
        for rank in self._ranks:
            rank.ask_to_end()
        deadline = time.monotonic() + RANK_END_SECONDS
        for rank in self._ranks:
            rank.make_end(deadline)


class _Rank:
    """One rank's process, the pipe to it, and the file that holds what it prints."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], link: Connection, output: BinaryIO
    ) -> None:
        self.number = number
        self.link = link
        self.life = os.pidfd_open(process.pid)
        self.closed = False
        self._process = process
        self._output = output

    def next(self) -> FromRank | None:
        """What it has said, if anything; says nothing more once it has closed the pipe."""
        try:
            if not self.closed and self.link.poll():
                return cast("FromRank", self.link.recv())
        except (EOFError, ConnectionResetError):
            self.closed = True
        return None

    def require_clean_end(self) -> None:
        """Wait for a process that has closed its pipe.

        Raises:
            RayloaderError: it did not end by itself with status 0.
        """
        try:
            status = self._process.wait(RANK_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            raise RayloaderError(
                f"rank {self.number} has finished but does not end (process {self._process.pid})"
            ) from None
        if status != 0:
            raise self._lost(status)

    def _lost(self, status: int) -> RayloaderError:
        how = f"with exit status {status}"
        if status < 0:
            how = f"by {signal.Signals(-status).name}"
            if -status == signal.SIGKILL:
                how += ", perhaps by the kernel for want of memory"
        lost = RayloaderError(f"rank {self.number} was ended {how}")
        self._output.seek(0)
        tail = self._output.read().decode(errors="replace").strip()[-_STDERR_TAIL:]
        if tail:
            lost.add_note(f"the last that it printed:\n{tail}")
        return lost

    def ask_to_end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def make_end(self, deadline: float) -> None:
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.link.close()
        os.close(self.life)
        self._output.close()


def _start(task: Task, catalog_fd: int, run_id: str) -> _Rank:
    mine, theirs = Pipe()
    output = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 (closed with its rank)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rayloader.experiment.consumer",
             str(theirs.fileno()), str(catalog_fd)],
            pass_fds=(theirs.fileno(), catalog_fd),
            env=_environment(os.environ, task, run_id),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A terminal's Ctrl-C goes to the driver alone, which ends the ranks in order.
            process_group=0,
        )  # fmt: skip
    except BaseException:
        mine.close()
        output.close()
        raise
    finally:
        theirs.close()
    rank = _Rank(task.rank, process, mine, output)
    with contextlib.suppress(BrokenPipeError):  # it is dead already; its pipe will tell
        mine.send(dataclasses.replace(task, driver=os.getpid()))
    return rank


def _environment(environ: Mapping[str, str], task: Task, run_id: str) -> dict[str, str]:
    """The environment of a rank: what a launcher such as torchrun would set, and no other's.

    It imports this same rayloader, whatever lies in the current directory.
    """
    here = os.path.dirname(os.path.dirname(os.path.abspath(rayloader.__file__)))
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(":") if path]
    cpus = len(os.sched_getaffinity(0))
    return {
        **scrubbed(environ),
        "PYTHONPATH": ":".join([here, *paths]),
        RUN_ID: run_id,
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.ranks),
        "LOCAL_RANK": str(task.rank),
        "LOCAL_WORLD_SIZE": str(task.ranks),
        THREADS: environ.get(THREADS) or str(max(1, cpus // task.ranks)),
    }


class RankTraceback(Exception):
    """Carries the traceback of a rank's error into the driver's, as text."""
