"""The processes of a run: those whose environment, or whose parent's, bears the run's name.

The same count serves any loader: what a run starts inherits its environment, however it is forked.
"""

from __future__ import annotations

import contextlib
import os
import time

from rayloader.launch import RUN_ID

_POLL_SECONDS = 0.02


class Census:
    """Counts the processes of one run on this machine, this user's only.

    Args:
        run_id: value of ``RAYLOADER_RUN_ID`` in the environment of everything the run starts.
    """

    def __init__(self, run_id: str) -> None:
        self._mark = f"{RUN_ID}={run_id}".encode()
        self._looked_at: set[int] = set()
        self._members: set[int] = set()

    def appeared(self) -> int:
        """Processes of the run that no earlier call has seen.

        Only processes never looked at are opened, so a call between two others is cheap.
        """
        present = _present()
        self._members &= present
        self._looked_at &= present
        found = 0
        # In order of their ids, a parent mostly comes before its children.
        for pid in sorted(present - self._looked_at):
            self._looked_at.add(pid)
            if self._belongs(pid):
                self._members.add(pid)
                found += 1
        return found

    def living(self) -> set[int]:
        """Ids of the run's processes that are alive now, zombies not counted."""
        self.appeared()
        return {pid for pid in self._members if _parent(pid) is not None}

    def wait_until_gone(self, seconds: float) -> bool:
        """Wait until no process of the run is left; ``False`` if one is after so long [s]."""
        deadline = time.monotonic() + seconds
        while self.living():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _belongs(self, pid: int) -> bool:
        # A process that writes its title over its environment is known by its parent.
        if _parent(pid) in self._members:
            return True
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            return self._mark in file.read().split(b"\0")
        return False


def _present() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _parent(pid: int) -> int | None:
    """The parent's id; ``None`` when the process is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(parent)
