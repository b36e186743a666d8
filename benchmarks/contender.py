"""A contender, and the running processes of several of them.

Method: a contender's processes are started once, before the clock, and wait for orders (see
peers.py and peer.c); contenders with the same command share a process. An order for several ranks
names the moment at which all of them begin. All of rayloader's processes share one private Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.files import WORD, FileSet

REPOSITORY = Path(__file__).resolve().parent.parent
RUN_ID = "RAYLOADER_RUN_ID"
PATIENCE = 180.0
"""An answer that takes longer is a failure [s]."""
TOGETHER = 0.02
"""Ranks begin this long after the order was sent [s]."""
MOST_EPOCHS = 20
"""A turn has no more epochs than this."""


class ContenderFailed(RuntimeError):
    """A contender could not be started, or its process ended; the message says why."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to read the files.

    Attributes:
        name: as tables and pictures have it.
        command: what starts one process of it.
        order: the words of every order to it.
        family: contenders of one family are drawn alike: ``c``, ``rayloader``, ``torch`` …
        ranks: processes that share the files; started as torchrun starts them.
        lasting: its processes are kept for later measures.
    """

    name: str
    command: tuple[str, ...]
    order: Mapping[str, Any] = dataclasses.field(hash=False)
    family: str
    ranks: int = 1
    lasting: bool = True

    def commands(self) -> list[tuple[str, ...]]:
        """The command of each rank."""
        if self.ranks == 1:
            return [self.command]
        return [("env", *_torchrun(rank, self.ranks), *self.command) for rank in range(self.ranks)]


def _torchrun(rank: int, ranks: int) -> list[str]:
    """The environment that torchrun gives to one rank of several on one node."""
    here = [f"RANK={rank}", f"LOCAL_RANK={rank}", f"WORLD_SIZE={ranks}"]
    run = [f"TORCHELASTIC_RUN_ID=bench-{os.getpid()}", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"]
    return [*here, f"LOCAL_WORLD_SIZE={ranks}", *run]


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of one contender, all ranks together; moments are CLOCK_MONOTONIC [s].

    Attributes:
        begin: when it was asked for, or the common start.
        first: when the first batch was there; 0 for the C reader.
        last: when the last batch had been dealt with, on the last rank.
        result: what the trainer computed; added over the ranks.
        facts: what each rank's loader says of itself.
    """

    files: int
    bytes: int
    begin: float
    first: float
    last: float
    result: int
    facts: tuple[Mapping[str, Any], ...]

    @property
    def seconds(self) -> float:
        """How long it took [s]."""
        return self.last - self.begin

    @classmethod
    def of(cls, answers: list[dict[str, Any]], begin: float | None) -> Epoch:
        """Put the ranks' answers together."""
        return cls(
            files=sum(answer["files"] for answer in answers),
            bytes=sum(answer["bytes"] for answer in answers),
            begin=begin if begin is not None else answers[0]["begin"],
            first=max(answer.get("first", 0.0) for answer in answers),
            last=max(answer["last"] for answer in answers),
            result=sum(answer.get("digest", answer.get("result", 0)) for answer in answers) & WORD,
            facts=tuple(answer.get("facts", {}) for answer in answers),
        )


class Processes:
    """The processes of a whole run, started when first asked for, ended together."""

    def __init__(self) -> None:
        self.paces: dict[Contender, float] = {}
        self._running: dict[tuple[str, ...], _Process] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end(list(self._running))

    def of(self, contender: Contender) -> list[_Process]:
        """One for each rank."""
        for command in contender.commands():
            if command not in self._running:
                self._running[command] = _Process(command)
        return [self._running[command] for command in contender.commands()]

    def end(self, contender: Contender) -> None:
        """End a contender's processes now."""
        self.paces.pop(contender, None)
        self._end([command for command in contender.commands() if command in self._running])

    def _end(self, commands: list[tuple[str, ...]]) -> None:
        ending = [self._running.pop(command) for command in commands]
        for process in ending:
            process.hang_up()
        for process in ending:
            process.end()


class Stage:
    """Contenders ready to run, each checked once to deliver exactly the files' bytes.

    Args:
        processes: of the whole run.
        contenders: those of one measure.
        files: what each epoch must deliver.
        verify: check every byte once, not only how many there are.
        warm_epochs: run before anything counts.
    """

    def __init__(
        self,
        processes: Processes,
        contenders: Iterable[Contender],
        files: FileSet,
        *,
        verify: bool = True,
        warm_epochs: int = 2,
    ) -> None:
        self.contenders = list(contenders)
        self.absent: dict[str, str] = {}
        self._processes = processes
        self._files = files
        self._verify = verify
        self._warm_epochs = warm_epochs

    def __enter__(self) -> Stage:
        for contender in self.contenders:
            self._processes.of(contender)  # all of them start at once
        for contender in list(self.contenders):
            try:
                self._admit(contender)
            except ContenderFailed as failure:
                self.absent[contender.name] = str(failure)
                self.contenders.remove(contender)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for contender in self.contenders:
            if not contender.lasting:
                self._processes.end(contender)

    def turn(
        self, contender: Contender, epochs: int | None = None, seconds: float = 0.0, **more: Any
    ) -> list[Epoch]:
        """Some epochs of one contender, one after the other.

        Args:
            contender: one of ``contenders``.
            epochs: how many; ``None``: as many as take ``seconds``, by the pace of the warm-up.
            seconds: see ``epochs`` [s].
            **more: words that override those of the contender's order.

        Raises:
            SystemExit: an epoch did not deliver the files.
        """
        count = epochs or self._affordable(contender, seconds)
        processes = self._processes.of(contender)
        order = {**contender.order, **more}
        if len(processes) == 1:
            processes[0].send({"epochs": count, **order})
            turn = [Epoch.of([processes[0].answer()], None) for _ in range(count)]
        else:
            turn = [_together(processes, order) for _ in range(count)]
        wanted = (self._files.count, self._files.bytes)
        for epoch in turn:
            if (epoch.files, epoch.bytes) != wanted:
                seen = f"{epoch.files} files, {epoch.bytes} bytes"
                raise SystemExit(f"{contender.name} delivered {seen} instead of {wanted}")
        return turn

    def pids(self, contender: Contender) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self._processes.of(contender)]

    def _affordable(self, contender: Contender, seconds: float) -> int:
        return max(1, min(MOST_EPOCHS, round(seconds / self._processes.paces[contender])))

    def _admit(self, contender: Contender) -> None:
        """Wait until it runs, check every byte once, and warm up."""
        for process in self._processes.of(contender):
            process.ready()
        if contender in self._processes.paces:
            return
        if self._verify:
            how = {"verify": 1} if contender.family.startswith("c") else {"trainer": "verify"}
            if self.turn(contender, 1, **how)[0].result != self._files.digest:
                raise SystemExit(f"{contender.name} delivered other bytes than the files hold")
        if self._warm_epochs:
            warm = self.turn(contender, self._warm_epochs)
            self._processes.paces[contender] = min(epoch.seconds for epoch in warm)


def _together(processes: list[_Process], order: Mapping[str, Any]) -> Epoch:
    """One epoch that all ranks begin at the same moment."""
    begin = time.monotonic() + TOGETHER
    for process in processes:
        process.send({"epochs": 1, "start": begin, **order})
    return Epoch.of([process.answer() for process in processes], begin)


class _Process:
    """One process that answers orders with lines of JSON."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.command = command
        self._is_ready = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._lines = b""
        self._popen = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, RUN_ID: f"bench-{os.getpid()}"},
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ready(self) -> None:
        if not self._is_ready:
            self.answer()
            self._is_ready = True

    def send(self, order: Mapping[str, Any]) -> None:
        assert self._popen.stdin is not None
        line = " ".join(f"{name}={value}" for name, value in order.items())
        try:
            self._popen.stdin.write(line.encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError as error:
            raise ContenderFailed(self._last_words()) from error

    def answer(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        fd, deadline = self._popen.stdout.fileno(), time.monotonic() + PATIENCE
        while b"\n" not in self._lines:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ContenderFailed(f"no answer for {PATIENCE:.0f} s; {self._last_words()}")
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise ContenderFailed(self._last_words())
            self._lines += chunk
        line, self._lines = self._lines.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def hang_up(self) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it may have ended already
            self._popen.stdin.close()

    def end(self) -> None:
        for force in (self._popen.terminate, self._popen.kill):
            try:
                self._popen.wait(15)
                break
            except subprocess.TimeoutExpired:
                force()
        self._popen.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"{' '.join(self.command)} ended without a word"


def python_peer(name: str, **words: Any) -> tuple[str, ...]:
    """The command of a Python peer."""
    named = (f"{word}={value}" for word, value in words.items())
    return (sys.executable, "-m", "benchmarks.peers", name, *named)
