"""What the commands of all benchmarks have in common: words, folders, files of results."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.outcome import Outcome

RESULTS = Path(__file__).resolve().parent / "results"
Draw = Callable[[dict[str, Any], Path], None]


def parser(
    name: str, doc: str | None, quick: str, measures: Iterable[str] | None = None
) -> argparse.ArgumentParser:
    """The words of ``python -m benchmarks.NAME`` that every benchmark takes.

    Args:
        name: of the benchmark's module.
        doc: its docstring.
        quick: what ``--quick`` does.
        measures: that ``--only`` may name; ``None``: whatever there is.
    """
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--only", action="append", choices=measures, help="this measure; repeat")
    default = Path(tempfile.gettempdir()) / "rayloader-bench"
    made.add_argument("--data", default=default, help="where the files lie (%(default)s)")
    made.add_argument("--out", help="folder for JSON and picture (full run: results/ here)")
    return made


def add_race(made: argparse.ArgumentParser, seconds: float, quick_seconds: float) -> None:
    """The words of benchmarks whose contenders have turns of so many seconds [s]."""
    made.add_argument("--fresh", action="store_true", help="make the files anew")
    made.add_argument("--rounds", type=int, help="turns of each contender (7; quick: 3)")
    made.add_argument(
        "--seconds", type=float, help=f"length of a turn ({seconds:g}; quick: {quick_seconds:g})"
    )
    made.add_argument("--seed", type=int, default=1, help="of the order (%(default)s)")


def data_of(words: argparse.Namespace) -> Path:
    """The directory of the data; made if missing."""
    data = Path(words.data).resolve()
    data.mkdir(parents=True, exist_ok=True)
    return data


def folder_of(words: argparse.Namespace, data: Path) -> Path:
    """Where results go: of a full run to the repository's own, of a partial one beside the data."""
    partial = words.quick or words.only
    folder = Path(words.out or (data / "results" if partial else RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def race_record(
    name: str,
    setting: Any,
    outcomes: dict[str, Outcome],
    load: list[float],
    seconds: float,
) -> dict[str, Any]:
    """What is kept of a run in which contenders had turns.

    Args:
        name: of the benchmark's module.
        setting: has ``data``, ``rounds``, ``seconds`` of a turn, and ``seed``.
        outcomes: of each measure.
        load: the machine's, before each measure and at the end.
        seconds: that the run took [s].
    """
    return {
        "environment": environment.describe(setting.data, name),
        "load": load,
        "rounds": setting.rounds,
        "turn_seconds": setting.seconds,
        "seed": setting.seed,
        "seconds": round(seconds),
        "measures": {measure: outcome.asdict() for measure, outcome in outcomes.items()},
    }


def keep(folder: Path, name: str, record: dict[str, Any], draw: Draw) -> None:
    """Write a run's record and its picture."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n")
    draw(record, folder / f"{name}.png")
