"""What a reader costs in memory when the catalog has 1,000,000 names, and how often a node has it.

Method: two ranks read one epoch; then each reader's /proc/PID/smaps is added up. USS is what it
maps and nobody else does (Private_Clean + Private_Dirty), less the arena, whose bound is
``memory_bytes``. The copies of the catalog on the node: how much of it is resident (its mappings'
Pss, over readers and trainers), plus what the readers' USS has grown by against a catalog of 2,000
names, divided by the saved catalog's size.

Command: ``python -m benchmarks.posix --only memory``.

Peers: the same reader with a catalog of 2,000 names.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from benchmarks import lineup
from benchmarks.contender import Epoch, Stage
from benchmarks.files import FileSet, million
from benchmarks.lineup import Setting
from benchmarks.outcome import Outcome, Row
from benchmarks.rounds import Race

MEGABYTE = 1e6


def run(setting: Setting) -> Outcome:
    """Measure."""
    many = million(setting.data, setting.small)
    small, small_absent = _measured(setting, setting.large)
    large, large_absent = _measured(setting, many)
    values = {"reader, 2,000 names": small.private, "reader, 1 M names": large.private}
    result = Race("MB", values, dict.fromkeys(values, "rayloader"))
    rows, notes = [], []
    if small.private and large.private:
        size = many.root.stat().st_size / MEGABYTE
        grown = max(0.0, sum(large.private) - sum(small.private))
        copies = (large.resident_catalog + grown) / size
        rows = [
            Row(
                "reader's USS less the arena, 1 M names",
                "",
                large.private,
                150,
                "MB",
                at_least=False,
            ),
            Row("copies of the catalog per node", "", [copies], 1.25, at_least=False),
        ]
        notes = [f"two ranks; the saved catalog of 1 M names has {size:.0f} MB"]
    absent = {**small_absent, **large_absent}
    return Outcome("Memory of a reader", result, rows, notes, absent)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of two ranks' processes.

    Attributes:
        private: each reader's USS less the arena [MB].
        resident_catalog: of the catalog's mappings, over readers and trainers [MB].
    """

    private: list[float]
    resident_catalog: float


def _measured(setting: Setting, files: FileSet) -> tuple[Memory, dict[str, str]]:
    ours = dataclasses.replace(lineup.rayloader(files, ranks=2), lasting=False)
    with Stage(setting.processes, [ours], files, verify=False, warm_epochs=0) as stage:
        if stage.absent:
            return Memory([], 0.0), stage.absent
        epoch = stage.turn(ours, 1)[0]
        return _memory(stage.pids(ours), epoch, str(files.root)), {}


def _memory(trainers: list[int], epoch: Epoch, source: str) -> Memory:
    readers = [int(facts["reader_pid"]) for facts in epoch.facts]
    private = [
        sum(m.private for m in mappings(pid) if "rayloader-arena" not in m.name) for pid in readers
    ]
    resident = sum(
        m.pss
        for pid in [*readers, *trainers]
        for m in mappings(pid)
        if source in m.name or "rayloader-catalog" in m.name
    )
    return Memory(private, resident)


@dataclasses.dataclass(frozen=True)
class Mapping:
    """One mapping of a process: its file's name, and what of it is private or its share [MB]."""

    name: str
    private: float
    pss: float


def mappings(pid: int) -> list[Mapping]:
    """The mappings of one process, from /proc/PID/smaps."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    heads = re.split(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *", text, flags=re.MULTILINE)
    return [_mapping(body) for body in heads[1:]]


def _mapping(body: str) -> Mapping:
    name, _, fields = body.partition("\n")
    sizes = {key: int(kib) * 1024 / MEGABYTE for key, kib in _FIELD.findall(fields)}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return Mapping(name, private, sizes["Pss"])


_FIELD = re.compile(r"^(\w+): +(\d+) kB$", flags=re.MULTILINE)
