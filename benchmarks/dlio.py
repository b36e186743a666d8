"""DLIO with its own loader and with rayloader, side by side: tables, a JSON file and a picture.

Command: ``python -m benchmarks.dlio`` from the repository's root; ``--quick`` has 41 steps per
epoch instead of 500 and one round, ``--fork CHECKOUT`` adds mlcommons' fork, as it is and with the
remedies that were proposed for it. Method: dlio_run.py; rounds as in rounds.py: every contender has
one run per round, in random order, and ratios are taken within a round.

Columns: DLIO's own loader with 0, 1, 2 and 4 workers per rank (``read_threads``); the fork with its
workers kept (which reads the list of the first epoch for ever: not the workload), and with its path
of 64 threads per worker opened for POSIX; rayloader; peer.c over the same files as the limit. All
have the same files, masks, steps and compute. DLIO 2.0.0 from PyPI decodes every image, which
rayloader does not; it has a table of its own, with real pictures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import command, environment, files, picture, report
from benchmarks.contender import ContenderFailed
from benchmarks.dlio_run import ADAPTER, Case, Dlio, Measured, run
from benchmarks.outcome import Outcome, Row
from benchmarks.rounds import Race

HERE = Path(__file__).resolve().parent
SIZE, BATCH, RANKS = 322_624, 24, 2
LONG, SHORT = 24_000, 2_000
"""Files: 500 and 41 steps per epoch."""
QUICK_PICTURES, PICTURES = 480, 2_400
ORDER = ("500 steps", "41 steps", "20 ms", "cold", "pictures")
"""Of the tables in the record."""
OURS = {
    "data_loader_classname": ADAPTER,
    "data_loader_sampler": "iterative",
    "read_threads": 2,
    "prefetch_size": 4,
}
"""rayloader's section ``reader``: the read-ahead of DLIO's own loader with two workers."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One loader in DLIO.

    Attributes:
        name: as tables have it.
        family: whose best counts.
        reader: its section ``reader``.
        remedy: applied to DLIO at run time.
    """

    name: str
    family: str
    reader: dict[str, Any]
    remedy: str = ""


def _many(workers: int) -> str:
    return f"{workers} worker" + ("s" if workers > 1 else "")


def own(workers: int) -> Contender:
    """DLIO's own loader."""
    name = f"own loader, {_many(workers)}" if workers else "own loader, in-process"
    family = "workers" if workers else "in-process"
    return Contender(name, family, {"read_threads": workers, "prefetch_size": 4})


def kept(workers: int) -> Contender:
    """The fork's own loader with its workers kept."""
    words = {"read_threads": workers, "prefetch_size": 4}
    return Contender(f"{_many(workers)} kept (stale list)", "invalid", words, "persistent")


def threads(workers: int) -> Contender:
    """The fork's path of 64 threads, opened for POSIX."""
    words = {"read_threads": workers, "multiprocessing_context": "spawn"}
    return Contender(f"64 threads opened, {_many(workers)}", "64 threads", words, "threads")


rayloader = Contender("rayloader", "rayloader", OURS)
OWN = [own(0), own(1), own(2), own(4)]
REMEDIES = [kept(2), threads(1), threads(2)]


@dataclasses.dataclass(frozen=True)
class Heat:
    """A case, and who takes part.

    Attributes:
        case: the conditions.
        dlio: whose DLIO.
        contenders: who runs.
        rows: targets of the results.
        notes: what a reader must know.
    """

    case: Case
    dlio: Dlio
    contenders: Sequence[Contender]
    rows: Callable[[dict[str, list[Measured]], dict[str, str], list[float]], list[Row]]
    notes: Sequence[str] = ()


def main() -> None:
    """Measure, and report."""
    words = _arguments()
    console = Console()
    data = command.data_of(words)
    folder = command.folder_of(words, data)
    measures = _kept(folder / "dlio.json")
    for heat in _heats(words, data, console):
        began, load = time.monotonic(), os.getloadavg()
        for measured in _measured(heat, words, data, console):
            measures[heat.case.name] = measured | {
                "seconds": round(time.monotonic() - began),
                "load_before": round(load[0], 1),
                "load_after": round(os.getloadavg()[0], 1),
            }
            command.keep(folder, "dlio", _record(measures, data), draw)
    console.print(f"results in {folder}")


def _kept(path: Path) -> dict[str, Any]:
    """The tables of an earlier run into the same folder; those measured now replace theirs."""
    if not path.exists():
        return {}
    measures: dict[str, Any] = json.loads(path.read_text())["measures"]
    return measures


def _record(measures: dict[str, Any], data: Path) -> dict[str, Any]:
    facts = environment.describe(data, "dlio")
    # Of paths in the command the last part: where things lie here is nobody's concern.
    facts["command"] = " ".join(word.rpartition("/")[2] for word in facts["command"].split())
    rounds = sorted({measure["rounds"] for measure in measures.values()})
    return {
        "environment": facts,
        "load": [one[when] for one in measures.values() for when in ("load_before", "load_after")],
        "seconds": sum(one["seconds"] for one in measures.values()),
        "rounds": rounds[0] if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}",
        "measures": {name: measures[name] for name in ORDER if name in measures},
    }


def _arguments() -> argparse.Namespace:
    parser = command.parser("dlio", __doc__, "41 steps per epoch, one round")
    has = str(HERE.parent / ".venv-dlio/bin/python")
    parser.add_argument(
        "--python", default=has, help="has DLIO 2.0.0; '': leave it out (%(default)s)"
    )
    parser.add_argument("--fork", help="checkout of mlcommons' fork")
    parser.add_argument("--fork-name", default="mlcommons' fork", help="for tables (%(default)s)")
    parser.add_argument("--fork-python", help="has what the fork needs, and rayloader (--python)")
    parser.add_argument("--rounds", type=int, help="runs of each contender (3; quick: 1)")
    parser.add_argument("--epochs", type=int, default=3, help="in each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (%(default)s)")
    return parser.parse_args()


def _rounds(words: argparse.Namespace) -> int:
    return words.rounds or (1 if words.quick else 3)


def _heats(words: argparse.Namespace, data: Path, console: Console) -> list[Heat]:
    """What is to be measured; their files are made."""
    heats = []
    if words.fork:
        fork = Dlio(words.fork_name, words.fork_python or words.python, words.fork)
        heats += _fork_heats(fork, words, data, console)
    if words.python:
        installed = Dlio("DLIO 2.0.0", words.python)
        if words.only is None or "pictures" in words.only:
            heats.append(_pictures(installed, words, data, console))
    return [heat for heat in heats if words.only is None or heat.case.name in words.only]


def _fork_heats(fork: Dlio, words: argparse.Namespace, data: Path, console: Console) -> list[Heat]:
    short = _dataset(data, SHORT, console)
    common = {"size": SIZE, "epochs": words.epochs, "ranks": RANKS, "batch": BATCH}
    everybody = [*OWN, *REMEDIES, rayloader]
    heats = [
        Heat(Case("41 steps", short, SHORT, **common), fork, everybody, _few_rows,
             ["41 steps per epoch flatter whoever does not start workers anew in each."]),
    ]  # fmt: skip
    if words.quick:
        return heats
    long = _dataset(data, LONG, console)
    return [
        Heat(Case("500 steps", long, LONG, **common), fork, everybody, _rows,
             ["Workers kept: they read their first epoch's list in every epoch; no result."]),
        *heats,
        Heat(Case("20 ms", long, LONG, compute=0.020, **common), fork,
             [own(2), own(0), threads(2), rayloader], _utilisation_rows),
        Heat(Case("cold", long, LONG, cold=True, **common), fork, [rayloader], _cold_rows),
    ]  # fmt: skip


def _pictures(installed: Dlio, words: argparse.Namespace, data: Path, console: Console) -> Heat:
    count = QUICK_PICTURES if words.quick else PICTURES
    folder = data / f"dlio-pictures-{count}"
    _generate_pictures(installed, folder, count, console)
    size = statistics.mean(path.stat().st_size for path in (folder / "train").iterdir())
    case = Case("pictures", folder, count, round(size), epochs=words.epochs)
    notes = [
        "DLIO 2.0.0 decodes each image; rayloader reads the bytes and decodes nothing: these rates "
        "are of different work.",
        "With the sampler that rayloader needs, 2.0.0 gives every rank the same files.",
    ]
    return Heat(case, installed, [*OWN, rayloader], _no_rows, notes)


# Files


def _dataset(data: Path, count: int, console: Console) -> Path:
    """``count`` files of random bytes named .jpeg, which the fork does not decode."""
    folder = data / f"dlio-{count}x{SIZE}"
    train = folder / "train"
    if not folder.with_suffix(".complete").exists():
        console.print(f"making {count} files in {train}")
        train.mkdir(parents=True, exist_ok=True)
        (folder / "valid").mkdir(exist_ok=True)
        draw, digits = np.random.default_rng(1), len(str(count))
        for at in range(count):
            (train / f"img_{at:0{digits}}_of_{count}.jpeg").write_bytes(draw.bytes(SIZE))
        folder.with_suffix(".complete").touch()
    return folder


def _generate_pictures(dlio: Dlio, folder: Path, count: int, console: Console) -> None:
    """Real pictures, by DLIO's own generator."""
    if folder.with_suffix(".complete").exists():
        return
    console.print(f"DLIO makes {count} pictures in {folder}")
    command = [
        dlio.mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", dlio.python,
        "-m", "dlio_benchmark.main", "workload=default", f"hydra.run.dir={folder}.hydra",
        f"++workload.dataset.data_folder={folder}", "++workload.dataset.format=jpeg",
        f"++workload.dataset.num_files_train={count}", "++workload.dataset.num_files_eval=0",
        "++workload.dataset.num_subfolders_eval=0", "++workload.dataset.num_subfolders_train=0",
        "++workload.dataset.num_samples_per_file=1", f"++workload.dataset.record_length={SIZE}",
        "++workload.workflow.generate_data=True", "++workload.workflow.train=False",
        "++workload.workflow.evaluation=False", "++workload.framework=pytorch",
        "++workload.reader.data_loader=pytorch", f"++workload.output.folder={folder}.out",
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if made.returncode != 0:
        raise SystemExit(f"DLIO's generator failed:\n{made.stdout[-2000:]}{made.stderr[-2000:]}")
    (folder / "valid").mkdir(exist_ok=True)
    folder.with_suffix(".complete").touch()


# Rounds


def _measured(
    heat: Heat, words: argparse.Namespace, data: Path, console: Console
) -> Iterator[dict[str, Any]]:
    """Everybody's runs of one case, for JSON, after each round; the tables after the last."""
    order = random.Random(words.seed)
    runs: dict[str, list[Measured]] = {one.name: [] for one in heat.contenders}
    limit: list[float] = []
    absent: dict[str, str] = {}
    family = {one.name: one.family for one in heat.contenders}
    if not heat.case.cold:
        _warm(heat.case)
    with CReader(data, heat.case) as c_reader:
        for _ in range(_rounds(words)):
            limit.append(c_reader.samples_per_second())
            for one in order.sample(list(heat.contenders), len(heat.contenders)):
                if one.name in absent:
                    continue
                with console.status(f"{heat.case.name}: {one.name}"):
                    try:
                        result = run(
                            heat.dlio, heat.case, data / "dlio-run", one.reader, one.remedy
                        )
                    except ContenderFailed as failure:
                        absent[one.name] = _reason(str(failure))
                        (data / "dlio-failed.log").write_text(str(failure))
                        del runs[one.name]
                        continue
                runs[one.name].append(result)
                console.print(f"{heat.case.name}, {one.name}: {_rate(result):,.0f} samples/s")
            yield _told(heat, runs, family, limit, absent)
    rows = heat.rows(runs, family, limit)
    if rows:
        report.show_targets(console, rows)
    for outcome in _outcomes(heat, runs, family, limit, absent):
        report.show(console, outcome)


def _told(
    heat: Heat,
    runs: dict[str, list[Measured]],
    family: dict[str, str],
    limit: list[float],
    absent: dict[str, str],
) -> dict[str, Any]:
    return {
        "dlio": heat.dlio.name,
        "case": {name: str(value) for name, value in vars(heat.case).items() if name != "data"},
        "steps": heat.case.steps,
        "rounds": len(limit),
        "family": family,
        "runs": {name: [one.asdict() for one in several] for name, several in runs.items()},
        "c_samples_per_second": limit,
        "absent": absent,
        "notes": list(heat.notes),
        "rows": [row.asdict() for row in heat.rows(runs, family, limit)],
    }


def _reason(failure: str) -> str:
    """The line of a failed run's output that tells most."""
    lines = [line.strip() for line in failure.splitlines() if line.strip(" -")]
    errors = [line for line in lines if re.match(r"\w*(Error|Exception)\b", line)]
    return (errors or lines)[-1][:200]


COLUMNS: dict[str, tuple[str, Callable[[Measured], float]]] = {
    "wall clock": ("samples/s", lambda one: one.samples_per_second),
    "DLIO's own metric": ("samples/s", lambda one: one.dlio_samples_per_second),
    "accelerator utilisation": ("%", lambda one: one.utilisation),
    "gap between epochs": ("ms", lambda one: one.gap * 1e3),
    "client CPU": ("CPU s/GB", lambda one: one.cpu_per_gigabyte),
}


def _outcomes(
    heat: Heat,
    runs: dict[str, list[Measured]],
    family: dict[str, str],
    limit: list[float],
    absent: dict[str, str],
) -> list[Outcome]:
    """One table for each thing that was measured."""
    outcomes = []
    for column, (unit, value) in COLUMNS.items():
        values = {name: [value(one) for one in several] for name, several in runs.items()}
        families = dict(family)
        if column == "wall clock":
            values["C, no training loop"], families["C, no training loop"] = limit, "c"
        title = f"{heat.dlio.name}, {heat.case.name}: {column}"
        last = column == "client CPU"
        outcomes.append(
            Outcome(
                title, Race(unit, values, families), [],
                notes=heat.notes if last else (), absent=absent if last else {},
            )
        )  # fmt: skip
    return outcomes


def _best(runs: dict[str, list[Measured]], family: dict[str, str], wanted: str) -> str | None:
    known = [name for name in runs if family[name] == wanted and runs[name]]
    return max(
        known,
        key=lambda name: statistics.median(one.samples_per_second for one in runs[name]),
        default=None,
    )


def _ratio_row(
    measure: str,
    runs: dict[str, list[Measured]],
    other: str | None,
    value: Callable[[Measured], float],
    target: float,
    *,
    at_least: bool = True,
    inverse: bool = False,
) -> list[Row]:
    if other is None or not runs.get("rayloader"):
        return []
    pairs = zip(runs["rayloader"], runs[other], strict=True)
    ratios = [value(b) / value(a) if inverse else value(a) / value(b) for a, b in pairs]
    return [Row(measure, other, ratios, target, at_least=at_least)]


def _rate(one: Measured) -> float:
    return one.samples_per_second


def _rows(runs: dict[str, list[Measured]], family: dict[str, str], limit: list[float]) -> list[Row]:
    workers = _best(runs, family, "workers")
    return [
        *_ratio_row("500 steps, samples/s", runs, workers, _rate, 8),
        *_ratio_row("500 steps, samples/s", runs, _best(runs, family, "in-process"), _rate, 2.5),
        *_ratio_row("500 steps, samples/s", runs, _best(runs, family, "64 threads"), _rate, 2.5),
        *_ratio_row("500 steps, gap", runs, workers, lambda one: one.gap, 20, inverse=True),
        *_ratio_row("500 steps, client CPU per GB", runs, workers,
                    lambda one: one.cpu_per_gigabyte, 0.5, at_least=False),
    ]  # fmt: skip


def _few_rows(
    runs: dict[str, list[Measured]], family: dict[str, str], limit: list[float]
) -> list[Row]:
    workers = _best(runs, family, "workers")
    return _ratio_row("41 steps, samples/s", runs, workers, _rate, 8)


def _utilisation_rows(
    runs: dict[str, list[Measured]], family: dict[str, str], limit: list[float]
) -> list[Row]:
    values = [one.utilisation for one in runs.get("rayloader", [])]
    return [Row("20 ms per step, hot: AU", "", values, 95, "%")] if values else []


def _cold_rows(
    runs: dict[str, list[Measured]], family: dict[str, str], limit: list[float]
) -> list[Row]:
    values = [
        one.samples_per_second / most
        for one, most in zip(runs.get("rayloader", []), limit, strict=False)
    ]
    return [Row("cold, samples/s", "C, 64 threads", values, 0.85)] if values else []


def _no_rows(
    runs: dict[str, list[Measured]], family: dict[str, str], limit: list[float]
) -> list[Row]:
    return []


def _warm(case: Case) -> None:
    """Read every file once, into the page cache."""
    for path in (case.data / "train").iterdir():
        path.read_bytes()


class CReader:
    """peer.c over the files of one case: the limit, without training loop or ranks."""

    def __init__(self, data: Path, case: Case) -> None:
        """Compile it; :meth:`__enter__` starts it."""
        self._case = case
        self._listing = data / "dlio.list"
        paths = sorted(map(str, (case.data / "train").iterdir()))[: case.files]
        self._listing.write_text("".join(f"{path}\n" for path in paths))
        self._paths = paths
        self._peer = data / "dlio-peer"
        source = HERE / "peer.c"
        subprocess.run(["cc", "-O3", "-pthread", str(source), "-o", str(self._peer)], check=True)

    def __enter__(self) -> CReader:
        self._popen = subprocess.Popen(
            [str(self._peer), str(self._listing), str(512 << 20)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._popen.stdout is not None
        self._popen.stdout.readline()  # ready
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.communicate(timeout=60)

    def samples_per_second(self) -> float:
        """Hot: the best of three thread counts. Cold: 64 threads, caches dropped before."""
        if self._case.cold:
            files.make_cold(self._paths)
            return self._epoch(64)
        return max(self._epoch(count) for count in (1, 2, 64))

    def _epoch(self, count: int) -> float:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(f"epochs=1 threads={count} into=arena verify=0\n")
        self._popen.stdin.flush()
        told = json.loads(self._popen.stdout.readline())
        return float(told["files"] / (told["last"] - told["begin"]))


# Picture


def draw(record: dict[str, Any], path: Path) -> None:
    """Panels of the cases that a record holds."""
    panels = [
        ("500 steps", "wall clock", "500 steps per epoch, 1 ms compute, page cache hot"),
        ("500 steps", "gap between epochs", "500 steps: last batch → first of the next epoch"),
        ("500 steps", "client CPU", "500 steps: CPU of all client processes"),
        ("41 steps", "wall clock", "41 steps per epoch, 1 ms compute, page cache hot"),
        ("20 ms", "accelerator utilisation", "20 ms compute per step: DLIO's AU"),
        ("pictures", "wall clock", "DLIO 2.0.0, which decodes"),
    ]
    drawn = []
    for name, column, title in panels:
        measure = record["measures"].get(name)
        if measure and any(measure["runs"].values()):
            unit, value = COLUMNS[column]
            drawn.append((title, _bars(measure, value, column == "wall clock"), unit))
    title = "DLIO's own loader and rayloader in DLIO: 322 KB files, batch 24, two MPI ranks"
    picture.draw_panels(drawn, title, record, path)


def _bars(
    measure: dict[str, Any], value: Callable[[Measured], float], with_limit: bool
) -> dict[str, dict[str, Any]]:
    bars = {}
    for name, several in measure["runs"].items():
        values = [value(Measured(said="", **one)) for one in several]
        bars[name] = _bar(measure["family"][name], values)
    if with_limit:
        bars["C, no training loop"] = _bar("c", measure["c_samples_per_second"])
    return bars


def _bar(family: str, values: list[float]) -> dict[str, Any]:
    return {"family": family, "median": statistics.median(values), "min": min(values),
            "max": max(values), "values": values}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
