"""What each rank read in each epoch, as JSON lines beside DLIO's output.

``rayloader receipt check DIR`` recomputes from them what they claim. The names of the fields are
those of ``rayloader.receipt.Receipt`` and, for what only DLIO's run has, of
:func:`rayloader_dlio.epoch.record`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

import rayloader
from rayloader import Catalog
from rayloader.receipt import Fingerprint, name_hashes

FORMAT = 1
"""Of a record; readers refuse a later one."""
NAME = "rayloader_receipts"
_FILE = re.compile(re.escape(NAME) + r"_\d+\.jsonl")
_AT_ONCE = 4096
"""Names hashed together [names]."""
_SHOWN = ("RAYLOADER_", "DLIO_", "S3DLIO_", "OMP_NUM_THREADS", "AWS_REGION", "AWS_ENDPOINT_URL",
          "OMPI_COMM_WORLD_", "SLURM_JOB_", "SLURM_STEP_")  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|RUN_ID", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Hashed:
    """A list of names, as the reader hashes those that it read.

    Attributes:
        files: names [files].
        content: of the names in any order; those of several ranks add up, modulo 2^64.
        order: of the names in their order.
        empty or absent lists have zeros.
    """

    files: int = 0
    content: int = 0
    order: int = 0


def hashed(files: Catalog) -> Hashed:
    """The fingerprint of a list."""
    whole = Fingerprint()
    for first in range(0, len(files), _AT_ONCE):
        some = np.arange(first, min(first + _AT_ONCE, len(files)))
        whole = whole.then(Fingerprint.of(name_hashes(*files.blob_at(some))))
    return Hashed(whole.names, whole.content, whole.order)


class Measure:
    """Clocks and counters of one reading."""

    def __init__(self, called: float) -> None:
        """Begin at ``called``, by ``time.perf_counter`` [s]."""
        self.began = called
        self.ended: float | None = None
        self.cpu_began = time.process_time()
        self.cpu = 0.0
        self.device_before: int | None = None
        self.device_after: int | None = None

    def end(self) -> None:
        """DLIO has asked for no more."""
        self.ended = time.perf_counter()
        self.cpu = time.process_time() - self.cpu_began

    @property
    def device_bytes(self) -> int | None:
        """Bytes that the device has read meanwhile [bytes]; ``None``: the kernel does not say."""
        if self.device_before is None or self.device_after is None:
            return None
        return self.device_after - self.device_before

    @property
    def seconds(self) -> float:
        """From the first ``next()`` to the end, the training's own time included [s]."""
        return (self.ended or time.perf_counter()) - self.began


@dataclasses.dataclass(frozen=True)
class Run:
    """What stands in every record of a run.

    Attributes:
        name: of the run; it tells the records of two runs apart, and opens nothing.
        host: of the rank.
        env: variables that matter, without secrets.
        versions: of what took part.
    """

    name: str
    host: str
    env: dict[str, str]
    versions: dict[str, str]

    @classmethod
    def of(cls, name: str, args: Any, environ: Mapping[str, str]) -> Run:
        """What is known at the start, with DLIO's ``args`` and this rank's environment."""
        return cls(name, platform.node(), environment(environ), versions(args))


class Writer:
    """One rank's file of records."""

    def __init__(self, folder: str, rank: int) -> None:
        """Make the file.

        Raises:
            OSError: it cannot be written.
        """
        os.makedirs(folder, exist_ok=True)
        self.pattern = os.path.join(folder, f"{NAME}_*.jsonl")
        self._file = open(os.path.join(folder, f"{NAME}_{rank}.jsonl"), "w")  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; complete in the file when this returns."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def remove_old(folder: str) -> None:
    """Remove the records of an earlier run; DLIO overwrites its own output too."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if _FILE.fullmatch(name):
                os.unlink(os.path.join(folder, name))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell how a run was made, without anything secret."""
    return {
        name: _without_user(value)
        for name, value in sorted(environ.items())
        if name.startswith(_SHOWN) and not _SECRET.search(name)
    }


def versions(args: Any) -> dict[str, str]:
    """Of all that took part."""
    import ray
    import torch

    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "rayloader": rayloader.__version__,
        "ray": str(ray.__version__),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "dlio_benchmark": _dlio_version(args),
        **{name: found for name in ("s3dlio", "obstore") if (found := _installed(name))},
    }


def _dlio_version(args: Any) -> str:
    """The version of the DLIO that runs: a checkout's own word, or what is installed."""
    module = sys.modules.get(type(args).__module__.partition(".")[0])
    where = getattr(module, "__file__", None)
    if where is not None:
        checkout = os.path.join(os.path.dirname(os.path.dirname(where)), "pyproject.toml")
        with contextlib.suppress(OSError):
            with open(checkout) as file:
                found = re.search(r'^version\s*=\s*"([^"]+)"', file.read(), re.MULTILINE)
            if found:
                return f"{found.group(1)} (checkout)"
    return _installed("dlio_benchmark") or "unknown"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _without_user(value: str) -> str:
    """A URL without user and password."""
    if "://" not in value:
        return value
    parts = urlsplit(value)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
