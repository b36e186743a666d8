"""All measures on POSIX files, side by side in one run: tables, a JSON file and a picture.

Command: ``python -m benchmarks.posix`` (``make bench``), from the repository's root. ``--quick``
takes two minutes; ``--only NAME`` runs one measure. Method: README.md in this directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks import environment, files, picture, report
from benchmarks.contender import Processes
from benchmarks.lineup import Setting
from benchmarks.measures import MEASURES
from benchmarks.outcome import Outcome

LARGE = (2_000, 322_624)
SMALL = (20_000, 10_000)
"""Files, and bytes of each."""
HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure, and report."""
    words = _arguments()
    console = Console()
    data = Path(words.data).resolve()
    data.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with Processes() as processes:
        setting = _setting(words, data, processes)
        outcomes, load = report.measured(MEASURES, setting, words.only or MEASURES, console)
    report.show_targets(console, [row for out in outcomes.values() for row in out.rows])
    record = _record(setting, outcomes, load, time.monotonic() - began)
    partial = words.quick or words.only
    folder = Path(words.out or (data / "results" if partial else HERE / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "posix.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    picture.draw(record, folder / "posix.png")
    console.print(f"{record['seconds']} s; results in {folder}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.posix", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and contenders")
    parser.add_argument("--only", action="append", choices=MEASURES, help="this measure; repeat")
    default = Path(tempfile.gettempdir()) / "rayloader-bench"
    parser.add_argument("--data", default=default, help="where the files lie (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="make the files anew")
    parser.add_argument("--rounds", type=int, help="turns of each contender (7; quick: 3)")
    parser.add_argument("--seconds", type=float, help="length of a turn (0.5; quick: 0.25)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (%(default)s)")
    parser.add_argument("--out", help="folder for JSON and picture (full run: results/ here)")
    return parser.parse_args()


def _setting(words: argparse.Namespace, data: Path, processes: Processes) -> Setting:
    return Setting(
        data=data,
        large=files.prepare(data, *LARGE, fresh=words.fresh),
        small=files.prepare(data, *SMALL, fresh=words.fresh),
        c_reader=_compiled(data),
        processes=processes,
        rounds=words.rounds or (3 if words.quick else 7),
        seconds=words.seconds or (0.25 if words.quick else 0.5),
        seed=words.seed,
        quick=words.quick,
    )


def _compiled(data: Path) -> Path:
    program = data / "peer"
    subprocess.run(["cc", "-O3", "-pthread", HERE / "peer.c", "-o", program], check=True)
    return program


def _record(
    setting: Setting, outcomes: dict[str, Outcome], load: list[float], seconds: float
) -> dict[str, object]:
    return {
        "environment": environment.describe(setting.data),
        "load": load,
        "rounds": setting.rounds,
        "turn_seconds": setting.seconds,
        "seed": setting.seed,
        "seconds": round(seconds),
        "measures": {name: outcome.asdict() for name, outcome in outcomes.items()},
    }


if __name__ == "__main__":
    main()
