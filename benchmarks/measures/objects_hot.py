"""One rank reads 2,000 objects of 322,624 bytes from a server on this machine, beside every peer.

Method: rounds (see rounds.py); every contender shuffles and asks for all objects in each epoch, and
its bytes were checked once. nginx over a directory is as quick as a server can be here; SeaweedFS
is a real one. Peers and server share the machine's cores. The CPU time is that of the reading
process, kernel included: rayloader's as its receipt has it, s3dlio's as its process has it.

Command: ``python -m benchmarks.objects --only nginx`` (or ``seaweedfs``).

Peers: rayloader with other clients, for information; s3dlio alone in a process that drops the
bytes, in three forms of overlapping calls; torch ``DataLoader`` over s3torchconnector with 0 to 8
workers; boto3 and obstore with 64 threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks import object_lineup
from benchmarks.contender import ContenderFailed, Epoch, Stage
from benchmarks.object_lineup import ObjectSetting, Server
from benchmarks.outcome import Outcome, Row, compared
from benchmarks.rounds import race, thousand_files_per_second

TARGETS = {"s3dlio": 0.9, "torch s3torchconnector": 1.5, "boto3": 3.0}
CPU_TARGET = 1.3


def nginx(setting: ObjectSetting) -> Outcome:
    """Measure against the quickest server."""
    return _run(setting, setting.nginx, "nginx")


def seaweedfs(setting: ObjectSetting) -> Outcome:
    """Measure against a real one."""
    return _run(setting, setting.seaweedfs, "SeaweedFS")


def _run(setting: ObjectSetting, server: Server, name: str) -> Outcome:
    contenders = object_lineup.contenders(setting, server)
    turns: dict[str, list[Sequence[Epoch]]] = {}
    with Stage(setting.processes, contenders, setting.objects) as stage:
        result = race(
            stage,
            setting,
            unit="1000 objects/s",
            value=thousand_files_per_second,
            keep=turns,
        )
    ours = "rayloader"
    engines = {facts["engine"] for turn in turns["rayloader"] for it in turn for facts in it.facts}
    if engines != {"http"}:
        raise ContenderFailed(f"rayloader read through {engines}, not from the server")
    rows = compared(f"{name}, objects/s", result, ours, TARGETS)
    raw = result.best("s3dlio")
    cpu = {
        who: [_cpu_microseconds(turn) for turn in turns[who]] for who in (ours, raw) if who in turns
    }
    if raw in cpu and ours in cpu:
        ratios = [a / b for a, b in zip(cpu[ours], cpu[raw], strict=True)]
        rows.append(
            Row(f"{name}, reader's CPU per object", raw, ratios, CPU_TARGET, at_least=False)
        )
    notes = [
        f"CPU per object, {who}: {statistics.median(values):.0f} µs" for who, values in cpu.items()
    ]
    return Outcome(f"{name}: 2,000 objects of 322 KB, hot", result, rows, notes, stage.absent)


def _cpu_microseconds(turn: Sequence[Epoch]) -> float:
    """Median CPU time of the reading process per object [µs]."""
    return statistics.median(
        sum(facts["cpu_reader"] for facts in epoch.facts) / epoch.files * 1e6 for epoch in turn
    )
