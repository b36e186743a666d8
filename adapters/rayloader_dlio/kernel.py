"""What the kernel knows of an epoch: file system, device, page cache, CPU times. Linux only."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import numpy as np

from rayloader import Catalog
from rayloader.experiment.pagecache import cached_share

SECTOR_BYTES = 512
"""Of the kernel's block statistics, whatever the device has [bytes]."""
SAMPLED_FILES = 8
"""Whose pages are looked for before an epoch [files]; the look is on the clock."""


class Mount(NamedTuple):
    """The file system that a path lies on."""

    fs_type: str
    options: str
    device: str
    """``major:minor``; major 0 is no block device."""


def mount_of(path: str) -> Mount | None:
    """The mount below which ``path`` lies; ``None`` where the kernel does not say."""
    try:
        path = os.path.realpath(path)
        with open("/proc/self/mountinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    found, longest = None, -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, more = before.split(), after.split()
        point = fields[4].encode().decode("unicode_escape")
        below = path == point or path.startswith(point.rstrip("/") + "/")
        if below and len(point) >= longest:  # of mounts over each other the last counts
            longest = len(point)
            options = ",".join(dict.fromkeys([*fields[5].split(","), *more[2].split(",")]))
            found = Mount(more[0], options, fields[2])
    return found


def device_read_bytes(mount: Mount | None) -> int | None:
    """Bytes that this mount's device has read since it was attached [bytes]; ``None``: no device.

    Of everybody on the node, and of the device or partition itself only.
    """
    if mount is None or mount.device.startswith("0:"):
        return None
    try:
        with open(f"/sys/dev/block/{mount.device}/stat") as file:
            return int(file.read().split()[2]) * SECTOR_BYTES
    except (OSError, ValueError, IndexError):
        return None


def why_no_device(mount: Mount | None) -> str:
    """Why :func:`device_read_bytes` says nothing."""
    if mount is None:
        return "the data lie on no mounted file system"
    if mount.device.startswith("0:"):
        return f"{mount.fs_type} has no block device of its own"
    return f"the kernel shows no statistics of device {mount.device}"


def resident_share(files: Catalog) -> float | None:
    """Share of some of these files that lies in the page cache [0..1]; ``None``: cannot be told."""
    return cached_share(files, SAMPLED_FILES)


class RayProcesses:
    """The processes of a private Ray other than readers: its keeper, the GCS and the raylet."""

    def __init__(self) -> None:
        """Found when they are first asked for."""
        self._reader = 0
        self._pids: list[int] = []
        self._before = 0.0

    def cpu_seconds(self, reader_pid: int) -> float | None:
        """Their CPU time since this was last asked, at first since their start [s].

        ``None`` when they are gone.

        A reader's parent is the raylet, whose parent keeps it and the GCS.

        Args:
            reader_pid: process of a reader in that Ray.
        """
        try:
            if reader_pid != self._reader:
                keeper = _stat(_stat(reader_pid).parent).parent
                self._pids = [keeper, *_children(keeper)]
                self._reader = reader_pid
            now = sum(_stat(pid).cpu_seconds for pid in self._pids)
        except OSError:
            return None
        before, self._before = self._before, now
        return max(0.0, now - before)


def _children(parent: int) -> list[int]:
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if _stat(pid).parent == parent:
                found.append(pid)
    return found


class _Stat(NamedTuple):
    parent: int
    cpu_seconds: float


_TICKS = os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> _Stat:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return _Stat(int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS)


def percentile(values: list[float], share: float) -> float:
    """The value that a share of ``values`` does not exceed; 0.0 of none."""
    return float(np.quantile(values, share)) if values else 0.0
