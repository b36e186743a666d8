"""All measures on object storage, side by side in one run: tables, a JSON file and a picture.

Command: ``python -m benchmarks.objects`` (``make bench-objects``), from the repository's root.
``--quick`` takes two minutes; ``--only NAME`` runs one measure. Method: README.md here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import command, files, picture, report
from benchmarks.contender import Processes
from benchmarks.files import FileSet
from benchmarks.measures import objects_hot, objects_latency
from benchmarks.object_lineup import ObjectSetting, Server
from benchmarks.outcome import Outcome
from tests.s3.servers import Nginx, SeaweedFS, credentials

OBJECTS = (2_000, 322_624)
"""Objects, and bytes of each."""
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
    data = command.data_of(words)
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
    record = command.race_record("objects", setting, outcomes, load, time.monotonic() - began)
    folder = command.folder_of(words, data)
    command.keep(folder, "objects", record, _draw)
    console.print(f"{record['seconds']} s; results in {folder}")


def _arguments() -> argparse.Namespace:
    parser = command.parser("objects", __doc__, "fewer rounds and contenders", MEASURES)
    command.add_race(parser, seconds=1.0, quick_seconds=0.5)
    return parser.parse_args()


def _draw(record: dict[str, Any], path: Path) -> None:
    picture.draw_panels(picture.found_panels(record, PANELS), TITLE, record, path, S3DLIO)


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
