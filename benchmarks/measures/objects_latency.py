"""Whether 64 in flight are 64 in flight on object storage: every request takes 20 ms.

Method: rayloader reads the objects from a server whose every answer comes 20 ms after its request
(slow_server.py); objects per second with 64 in flight, divided by those with 1, for which fewer
objects are read. The server counts what is in flight; another peak than the one asked for is an
error.

Command: ``python -m benchmarks.objects --only latency``.

Peers: rayloader with one request in flight.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import object_lineup
from benchmarks.contender import Contender, ContenderFailed, Stage
from benchmarks.object_lineup import ObjectSetting
from benchmarks.outcome import Outcome, Row
from benchmarks.rounds import Race, thousand_files_per_second

LATENCY = 0.02
"""Of every answer [s]."""
EPOCHS = {1: 1, 64: 3}
"""Concurrency → epochs per turn."""
FEW = 64
"""Objects that are read with one in flight [objects]."""


def run(setting: ObjectSetting) -> Outcome:
    """Measure."""
    rates: dict[str, list[float]] = {f"{count} in flight": [] for count in EPOCHS}
    with _server(setting) as server:
        for concurrency, files in {1: setting.few(FEW), 64: setting.objects}.items():
            contender = object_lineup.rayloader(setting, server.at, files)
            with Stage(setting.processes, [contender], files) as stage:
                if stage.absent:
                    raise ContenderFailed(stage.absent[contender.name])
                for _ in range(setting.rounds):
                    rate = _rate(stage, contender, server, concurrency)
                    rates[f"{concurrency} in flight"].append(rate)
    one, all_at_once = rates.values()
    ratios = [b / a for a, b in zip(one, all_at_once, strict=True)]
    row = Row("objects/s at 20 ms latency, 64 in flight", "1 in flight", ratios, 45)
    result = Race("objects/s", rates, dict.fromkeys(rates, "rayloader"))
    return Outcome("A server whose every answer takes 20 ms", result, [row])


def _rate(stage: Stage, contender: Contender, server: _Slow, concurrency: int) -> float:
    """Objects per second in one turn."""
    stage.turn(contender, 1, concurrency=concurrency)
    server.peak()
    turn = stage.turn(contender, EPOCHS[concurrency], concurrency=concurrency)
    if (peak := server.peak()) != concurrency:
        raise ContenderFailed(f"{peak} in flight instead of {concurrency}")
    return thousand_files_per_second(turn) * 1e3


class _Slow:
    """The server's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.at = object_lineup.Server(process.stdout.readline().strip())

    def peak(self) -> int:
        """The most requests in flight since it was asked last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def _server(setting: ObjectSetting) -> Iterator[_Slow]:
    command = [sys.executable, "-m", "benchmarks.slow_server", str(setting.data), str(LATENCY)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield _Slow(process)
        assert process.stdin is not None
        process.stdin.close()
