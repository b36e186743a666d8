"""What this process may have: the limits of its user and of its control groups, in words.

A control group's files are read where it lies below ``/sys/fs/cgroup``, version 1 or 2; inside a
container, where its own path is not to be seen, what is mounted there is the container's own.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

_CGROUPS = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 62
_ABOVE_LIMITS = 1 << 21 | 1 << 24
"""CAP_SYS_ADMIN and CAP_SYS_RESOURCE: who has one may exceed ``ulimit -u``."""


def memory_free(mount: str = _CGROUPS, membership: str = "/proc/self/cgroup") -> int:
    """What this process's memory cgroup and all above it have free; huge where none limits [bytes].

    The page cache is not counted as used: the kernel takes it back before it kills anybody. (A
    memfd is none: it is counted with the anonymous memory.)
    """
    free = _NO_LIMIT
    for group, version in groups("memory", mount, membership):
        limit, used, prefix = _MEMORY_FILES[version]
        with contextlib.suppress(OSError, ValueError):
            most = _read(f"{group}/{limit}")
            if most != "max":
                counts = dict(line.split() for line in _read(f"{group}/memory.stat").splitlines())
                cache = sum(int(counts.get(f"{prefix}{age}_file", 0)) for age in _AGES)
                free = min(free, max(0, int(most) - int(_read(f"{group}/{used}")) + cache))
    return free


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
_AGES = ("active", "inactive")
_OOM_FILES = {1: "memory.oom_control", 2: "memory.events"}


class OomKills:
    """Whether the kernel's out-of-memory killer has struck in a process's memory cgroup since."""

    def __init__(self, pid: int, mount: str = _CGROUPS, membership: str = "") -> None:
        """Count from now on; the process may end meanwhile."""
        self._file = ""
        for group, version in groups("memory", mount, membership or f"/proc/{pid}/cgroup"):
            if os.path.exists(file := f"{group}/{_OOM_FILES[version]}"):
                self._file = file  # the last is the process's own
        self._before = self._count()

    @property
    def risen(self) -> bool:
        """True when a process of that group has been killed; never where nobody counts."""
        return self._count() > self._before

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in _read(self._file).splitlines())["oom_kill"])
        return 0


def too_few_processes(wanted: int) -> str:
    """Why this user cannot have ``wanted`` more processes and threads, and what to set.

    Returns:
        The words, or nothing where no limit is known to stand in the way.
    """
    room, why = _NO_LIMIT, ""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and not _above_limits():
        running = _threads_of(os.getuid())
        room = limit - running
        why = (
            f"this user may run {limit} processes and threads (ulimit -u) and runs {running}: "
            f"allow at least {running + wanted}"
        )
    for group, _ in groups("pids", _CGROUPS, "/proc/self/cgroup"):
        with contextlib.suppress(OSError, ValueError):
            most, running = int(_read(f"{group}/pids.max")), int(_read(f"{group}/pids.current"))
            if most - running < room:
                room = most - running
                why = (
                    f"the control group may run {most} processes and threads (pids.max) and runs "
                    f"{running}: allow at least {running + wanted}"
                )
    return why if room < wanted else ""


def too_little_address_space(wanted: int) -> str:
    """Why ``wanted`` bytes more cannot be mapped, and what to set; nothing where they can be."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    used = int(_read("/proc/self/statm").split()[0]) * resource.getpagesize()
    if used + wanted <= limit:
        return ""
    return (
        f"this process may map {limit >> 10:,} KiB (ulimit -v) and has mapped {used >> 10:,}: "
        f"allow at least {(used + wanted) >> 10:,}"
    )


def groups(controller: str, mount: str, membership: str) -> Iterator[tuple[str, int]]:
    """(directory, version) of this process's group of a controller, and of those above it."""
    try:
        lines = _read(membership).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base, version = (f"{mount}/{controller}", 1) if controllers else (mount, 2)
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            yield "/".join([base, *parts[:depth]]), version


def _above_limits() -> bool:
    """Whether the kernel lets this process exceed its user's number of processes."""
    if os.getuid() == 0:
        return True
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _ABOVE_LIMITS)
    return False


def _threads_of(user: int) -> int:
    """Threads of all processes of a user that are to be seen from here."""
    found = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{entry}").st_uid == user:
                found += len(os.listdir(f"/proc/{entry}/task"))
    return found


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
