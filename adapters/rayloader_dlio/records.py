"""What each rank read in each epoch, as JSON lines beside DLIO's output.

``rayloader receipt check DIR`` recomputes from them what they claim. The names of the fields are
those of ``rayloader.receipt.Receipt`` and, for what only DLIO's run has, of :func:`record`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

import rayloader
from rayloader import Catalog
from rayloader.receipt import Fingerprint, name_hashes
from rayloader_dlio import kernel
from rayloader_dlio.settings import record_bytes

if TYPE_CHECKING:
    from rayloader_dlio.session import Epoch, Session

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
    def of(cls, session: Session, environ: Mapping[str, str]) -> Run:
        """What is known at the start."""
        return cls(
            hashlib.sha256(f"receipt {session.ranks.run}".encode()).hexdigest()[:16],
            platform.node(),
            environment(environ),
            versions(session.args),
        )


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


def record(epoch: Epoch) -> dict[str, Any]:
    """Everything that is known of one reading.

    Beside the receipt's own fields: ``part`` (train or valid); ``epoch`` (DLIO's number) and
    ``reading`` (the reader's); ``steps_expected`` and ``steps_yielded``; ``files_assigned``,
    ``files_read``, ``files_remainder``; ``assigned_hash`` and ``assigned_order_hash`` of the files
    that the steps need, as ``read_hash`` and ``order_hash`` are of those read; ``share_hash`` of
    all that DLIO assigned; ``dataset_hash`` of this rank's slice of all files (the ranks' add up);
    ``bytes_nominal`` as DLIO reckons; ``bytes_files``; ``bytes_delivered``;
    ``bytes_in_excluded_steps``: read before the first step that AU counts, or for the last that it
    does not; ``resident_bytes_before`` by a sample; ``device_bytes`` and ``cpu_ray`` of everybody
    on the node, the latter since the record before; times in seconds.
    """
    session, share, measure = epoch.session, epoch.share, epoch.measure
    assert share is not None
    assert measure is not None
    receipt = epoch.receipt
    read = epoch.hashes.result() if epoch.hashes is not None else Hashed()
    rest = epoch.all_hashes.result() if epoch.all_hashes is not None else Hashed()
    slice_ = session.slices[epoch.train]
    device = measure.device_bytes
    options, launch = session.settings.options, session.ranks.launch
    per_file = int(session.args.num_samples_per_file)
    batch_size = session.args.batch_size if epoch.train else session.args.batch_size_eval
    nominal = share.steps * int(batch_size) * record_bytes(session.args)
    resident = epoch.resident
    return {
        **receipt,
        "format": FORMAT,
        "run": session.run.name,
        "part": "train" if epoch.train else "valid",
        "epoch": epoch.number,
        "reading": receipt["epoch"],
        "local_rank": launch.local_rank,
        "local_world_size": launch.local_world_size,
        "host": session.run.host,
        "batch_size": int(batch_size),
        "num_samples_per_file": per_file,
        "steps_expected": share.steps,
        "steps_yielded": epoch.steps_yielded,
        "files_assigned": len(share.files) + len(share.rest),
        "files_read": receipt["files"],
        "files_remainder": len(share.rest),
        "assigned_hash": f"{read.content:016x}",
        "assigned_order_hash": f"{read.order:016x}",
        "share_hash": f"{(read.content + rest.content) % (1 << 64):016x}",
        "dataset_hash": f"{slice_.content:016x}",
        "dataset_files": slice_.files,
        "bytes_nominal": nominal,
        "bytes_files": receipt["bytes"],
        "bytes_delivered": receipt["bytes"] if options.deliver else 0,
        "bytes_in_excluded_steps": epoch.excluded_bytes,
        "deliver": options.deliver,
        "read_ahead_batches_max": session.read_ahead_most(),
        "read_ahead_batches_dlio": session.settings.dlio_read_ahead,
        "node_in_flight_ceiling": options.concurrency * launch.local_world_size,
        "storage": session.settings.storage,
        "fs_type": session.mount.fs_type if session.mount else session.settings.storage,
        "mount_options": session.mount.options if session.mount else None,
        "ray_files_apart": session.apart,
        "resident_bytes_before": None if resident is None else int(resident * receipt["bytes"]),
        "resident_sampled_files": kernel.SAMPLED_FILES if resident is not None else 0,
        "device_bytes": device,
        "device_bytes_why": None if device is not None else kernel.why_no_device(session.mount),
        "cpu_trainer": measure.cpu,
        "cpu_ray": session.ray.cpu_seconds(receipt["reader_pid"]),
        "affinity_trainer": sorted(os.sched_getaffinity(0)),
        "pid": os.getpid(),
        "wall_s": measure.seconds,
        "stall_p50": kernel.percentile(epoch.waits, 0.50),
        "stall_p99": kernel.percentile(epoch.waits, 0.99),
        "gap_dlio_s": epoch.gap_dlio,
        "gap_ours_s": epoch.gap_ours,
        "options": options.asdict(),
        "env": session.run.env,
        "versions": session.run.versions,
    }


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
        **{name: found for name in ("s3dlio",) if (found := _installed(name))},
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
