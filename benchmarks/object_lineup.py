"""Who contends on object storage: every contender is described here, once."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from benchmarks.contender import Contender, Processes
from benchmarks.files import FileSet, digest_of

BATCH, IN_FLIGHT = 24, 64
"""Objects per batch; objects in flight."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that has the objects.

    Attributes:
        endpoint: its URL.
    """

    endpoint: str


@dataclasses.dataclass(frozen=True)
class ObjectSetting:
    """One run of the benchmarks of object storage.

    Attributes:
        data: the directory that holds the objects as files; its folders are buckets.
        objects: 2,000 of 322,624 bytes.
        nginx: serves ``data``.
        seaweedfs: has the same objects under the same names.
        processes: the contenders' processes.
        rounds: how often each contender has a turn.
        seconds: about how long a turn is [s].
        seed: of the order within rounds.
        quick: fewer contenders, too.
    """

    data: Path
    objects: FileSet
    nginx: Server
    seaweedfs: Server
    processes: Processes
    rounds: int
    seconds: float
    seed: int
    quick: bool

    @property
    def uris(self) -> Path:
        """A text file with one URI per line."""
        listed = self.objects.listing.with_suffix(".uris")
        if not listed.exists():
            names = (Path(path).relative_to(self.data) for path in self.objects.paths())
            listed.write_text("".join(f"s3://{name}\n" for name in names))
        return listed

    @property
    def catalog(self) -> Path:
        """A saved catalog of the objects, with their sizes."""
        return saved_catalog(self, self.objects)

    def few(self, count: int) -> FileSet:
        """The first so many of the objects, as a set of its own."""
        paths = self.objects.paths()[:count]
        listing = self.data / f"first-{count}.list"
        listing.write_text("".join(f"{path}\n" for path in paths))
        size = self.objects.size
        return FileSet(self.objects.root, listing, count, size, digest_of(paths, size))


def saved_catalog(setting: ObjectSetting, objects: FileSet) -> Path:
    """A saved catalog of some objects: of an S3 prefix, with sizes."""
    import numpy as np

    from rayloader.catalog import Catalog

    saved = objects.listing.with_suffix(".s3.arrow")
    if not saved.exists():
        bucket = objects.root.relative_to(setting.data)
        names = [str(Path(path).relative_to(objects.root)) for path in objects.paths()]
        sizes = np.full(len(names), objects.size, np.int64)
        Catalog.of_files(names, f"s3://{bucket}", sizes).save(saved)
    return saved


def contenders(setting: ObjectSetting, server: Server) -> list[Contender]:
    """All of them before one server."""
    chosen = [
        rayloader(setting, server, setting.objects),
        *(rayloader(setting, server, setting.objects, one) for one in ("obstore", "s3dlio")),
        *(s3dlio(setting, server, "get_many", calls) for calls in (1, 8)),
        s3dlio(setting, server, "get_many_async", 8),
        *(torch(setting, server, workers) for workers in (0, 2, 4)),
        _threads(setting, server, "boto3"),
        _threads(setting, server, "obstore"),
    ]
    if not setting.quick:
        chosen += [
            *(s3dlio(setting, server, "get_many", calls) for calls in (2, 4, 16)),
            *(s3dlio(setting, server, "get_many_async", calls) for calls in (4, 16)),
            s3dlio(setting, server, "get_into", IN_FLIGHT),
            *(torch(setting, server, workers) for workers in (1, 8)),
        ]
    return chosen


def rayloader(
    setting: ObjectSetting, server: Server, objects: FileSet, client: str = "http"
) -> Contender:
    """Our own, over a saved catalog; through other clients for information."""
    source = saved_catalog(setting, objects)
    words = {"source": source, "batch_size": BATCH, "client": client}
    command = _command(server, "object_peers", "rayloader", **words)
    name = "rayloader" if client == "http" else f"rayloader, client={client}"
    return Contender(name, command, {}, name, lasting=False)


def s3dlio(setting: ObjectSetting, server: Server, form: str, calls: int) -> Contender:
    """s3dlio alone: so many calls at once, with 64 objects in flight in all."""
    command = _command(server, "raw_s3dlio", uris=setting.uris, size=setting.objects.size)
    each = IN_FLIGHT // calls
    name = f"s3dlio.{form}, {calls} calls of {each}"
    return Contender(name, command, {"form": form, "calls": calls}, "s3dlio", lasting=False)


def torch(setting: ObjectSetting, server: Server, workers: int) -> Contender:
    """``DataLoader`` over s3torchconnector."""
    where = f"{workers} worker{'s' * (workers != 1)}" if workers else "in-process"
    return Contender(
        f"torch + s3torchconnector, {where}",
        _peer(setting, server, "s3-torch"),
        {"workers": workers, "collate": "stack"},
        "torch s3torchconnector",
        lasting=False,
    )


def _threads(setting: ObjectSetting, server: Server, client: str) -> Contender:
    name = f"{client}, {IN_FLIGHT} threads"
    return Contender(name, _peer(setting, server, client), {}, client, lasting=False)


def _peer(setting: ObjectSetting, server: Server, name: str) -> tuple[str, ...]:
    return _command(server, "object_peers", name, uris=setting.uris, batch_size=BATCH)


def _command(server: Server, module: str, *names: str, **words: Any) -> tuple[str, ...]:
    """A Python peer that asks one server; credentials are in the environment already."""
    named = (f"{word}={value}" for word, value in words.items())
    where = ("env", f"AWS_ENDPOINT_URL={server.endpoint}")
    return (*where, sys.executable, "-m", f"benchmarks.{module}", *names, *named)
