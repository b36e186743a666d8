"""All measures on POSIX files, side by side in one run: tables, a JSON file and a picture.

Command: ``python -m benchmarks.posix`` (``make bench``), from the repository's root. ``--quick``
takes two minutes; ``--only NAME`` runs one measure. Method: README.md in this directory.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from rich.console import Console

from benchmarks import command, files, picture, report
from benchmarks.contender import Processes
from benchmarks.lineup import Setting
from benchmarks.measures import MEASURES

LARGE = (2_000, 322_624)
SMALL = (20_000, 10_000)
"""Files, and bytes of each."""
HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure, and report."""
    words = _arguments()
    console = Console()
    data = command.data_of(words)
    began = time.monotonic()
    with Processes() as processes:
        setting = _setting(words, data, processes)
        outcomes, load = report.measured(MEASURES, setting, words.only or MEASURES, console)
    report.show_targets(console, [row for out in outcomes.values() for row in out.rows])
    record = command.race_record("posix", setting, outcomes, load, time.monotonic() - began)
    folder = command.folder_of(words, data)
    command.keep(folder, "posix", record, picture.draw)
    console.print(f"{record['seconds']} s; results in {folder}")


def _arguments() -> argparse.Namespace:
    parser = command.parser("posix", __doc__, "fewer rounds and contenders", MEASURES)
    command.add_race(parser, seconds=0.5, quick_seconds=0.25)
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


if __name__ == "__main__":
    main()
