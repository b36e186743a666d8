"""All measures on object storage, side by side in one run: tables, a JSON file and a picture.

Command: ``python -m benchmarks.objects`` (``make bench-objects``), from the repository's root.
``--quick`` takes two minutes; ``--only NAME`` runs one measure. Method: README.md here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from benchmarks import environment, files, picture, report
from benchmarks.contender import Processes
from benchmarks.files import FileSet
from benchmarks.measures import objects_hot, objects_latency
from benchmarks.object_lineup import ObjectSetting, Server
from benchmarks.outcome import Outcome
from tests.s3.servers import Nginx, SeaweedFS, credentials

OBJECTS = (2_000, 322_624)
"""Objects, and bytes of each."""
HERE = Path(__file__).resolve().parent
MEASURES: dict[str, Callable[[ObjectSetting], Outcome]] = {
    "nginx": objects_hot.nginx,
    "seaweedfs": objects_hot.seaweedfs,
    "latency": objects_latency.run,
}
"""Name, as ``--only`` takes it → what measures it."""
PANELS = (
    ("nginx", "nginx: as quick as a server can be here"),
    ("seaweedfs", "SeaweedFS"),
    ("latency", "rayloader, answers take 20 ms"),
)
"""Measure → title in the picture."""
TITLE = "rayloader beside its peers: 2,000 objects of 322 KB, hot, to one training loop"
S3DLIO = picture.Yardstick("s3dlio", "s3dlio alone, which drops the bytes")


def main() -> None:
    """Measure, and report."""
    words = _arguments()
    console = Console()
    data = Path(words.data).resolve()
    data.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    objects = files.prepare(data, *OBJECTS, fresh=words.fresh)
    os.environ.update(credentials(""))
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ro-")))
        nginx = stack.enter_context(Nginx(temporary / "nginx", data))
        seaweedfs = stack.enter_context(SeaweedFS(temporary / "seaweedfs"))
        with console.status("filling SeaweedFS"):
            _fill(seaweedfs, objects)
        setting = ObjectSetting(
            data=data,
            objects=objects,
            nginx=Server(nginx.endpoint),
            seaweedfs=Server(seaweedfs.endpoint),
            processes=stack.enter_context(Processes()),
            rounds=words.rounds or (3 if words.quick else 7),
            seconds=words.seconds or (0.5 if words.quick else 1.0),
            seed=words.seed,
            quick=words.quick,
        )
        outcomes, load = report.measured(MEASURES, setting, words.only or MEASURES, console)
    report.show_targets(console, [row for out in outcomes.values() for row in out.rows])
    record = {
        "environment": environment.describe(data, "objects"),
        "load": load,
        "rounds": setting.rounds,
        "turn_seconds": setting.seconds,
        "seed": setting.seed,
        "seconds": round(time.monotonic() - began),
        "measures": {name: outcome.asdict() for name, outcome in outcomes.items()},
    }
    partial = words.quick or words.only
    folder = Path(words.out or (data / "results" if partial else HERE / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "objects.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    panels = picture.found_panels(record, PANELS)
    picture.draw_panels(panels, TITLE, record, folder / "objects.png", S3DLIO)
    console.print(f"{record['seconds']} s; results in {folder}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objects", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and contenders")
    parser.add_argument("--only", action="append", choices=MEASURES, help="this measure; repeat")
    default = Path(tempfile.gettempdir()) / "rayloader-bench"
    parser.add_argument("--data", default=default, help="where the files lie (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="make the files anew")
    parser.add_argument("--rounds", type=int, help="turns of each contender (7; quick: 3)")
    parser.add_argument("--seconds", type=float, help="length of a turn (1; quick: 0.5)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (%(default)s)")
    parser.add_argument("--out", help="folder for JSON and picture (full run: results/ here)")
    return parser.parse_args()


def _fill(server: SeaweedFS, objects: FileSet) -> None:
    """Put the files into the server, under the names that nginx has for them."""
    bucket = objects.root.name
    with contextlib.closing(server.client()) as s3, ThreadPoolExecutor(8) as pool:
        s3.create_bucket(Bucket=bucket)

        def put(path: str) -> None:
            key = str(Path(path).relative_to(objects.root))
            s3.put_object(Bucket=bucket, Key=key, Body=Path(path).read_bytes())

        list(pool.map(put, objects.paths()))


if __name__ == "__main__":
    main()
