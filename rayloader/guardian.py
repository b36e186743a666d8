"""The guardian: the process that owns what the ranks of one run share on one node.

``python -m rayloader.guardian NAME`` binds the abstract socket NAME, becomes a daemon and serves
``rayloader.node.Guardian`` until its last owner is gone. It imports neither ray, torch nor numpy.

Two processes watch each other, because either can be killed::

    guardian ── keeper ─┬─ gcs_server          the kernel kills these two with the keeper,
                        └─ raylet ── readers   and these with the raylet

Both are subreapers: whatever loses its parent becomes their child. When the keeper dies, the
guardian ends the rest; when the guardian dies, the keeper does, and removes the directory too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from rayloader.config import (
    DIRECTORY_BYTES,
    DIRECTORY_FREE_BYTES,
    END_SECONDS,
    FIRST_OWNER_SECONDS,
    LEAST_PROCESSES,
    USUAL_PROCESSES,
)
from rayloader.limits import too_few_processes
from rayloader.node import LOST_THE_RACE, SERVING, encode, receive
from rayloader.sockets import peer

DIRECTORY_PREFIX = "rayloader-"

_PR_SET_CHILD_SUBREAPER = 36
_BACKLOG = 512
_LOCK = "lock"


@dataclasses.dataclass(eq=False)
class _Peer:
    """One connection: a rank's life line, or one of its calls."""

    connection: socket.socket
    pid: int
    pidfd: int | None = None
    making: str | None = None


@dataclasses.dataclass
class _Shared:
    """A descriptor by name: being made, or made and held by some processes."""

    maker: _Peer
    waiting: list[_Peer] = dataclasses.field(default_factory=list)
    fd: int | None = None
    holders: Counter[int] = dataclasses.field(default_factory=Counter)


class _Server:
    """The guardian's single-threaded loop and everything it knows."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._owners: set[_Peer] = set()
        self._shared: dict[str, _Shared] = {}
        self._rays: list[_PrivateRay] = []
        self._stop = False
        self._do: dict[str, Callable[[_Peer, dict[str, Any]], None]] = {
            "join": self._join,
            "ray": self._ask_ray,
            "shared": self._ask_shared,
            "forget": self._forget,
        }

    def serve(self) -> None:
        """Until the last owner is gone or SIGTERM comes; then end everything."""
        wakeup = _signals(self._terminate)
        self._watch(self._listener, self._accept)
        self._watch(wakeup, lambda: self._reap(wakeup))
        give_up = time.monotonic() + FIRST_OWNER_SECONDS
        joined = False
        while not self._stop:
            for key, _ in self._selector.select(None if joined else 1.0):
                key.data()
            joined = joined or bool(self._owners)
            self._stop |= not self._owners if joined else time.monotonic() > give_up
        # The name is free from here on: a rank that comes now starts a new guardian.
        self._listener.close()
        end_children()
        for ray in self._rays:
            ray.remove()

    def _watch(self, source: Any, then: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, then)

    def _terminate(self) -> None:
        self._stop = True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        pid, uid = peer(connection)
        if uid != os.getuid():
            connection.close()
            return
        one = _Peer(connection, pid)
        self._watch(connection, lambda: self._hear(one))

    def _hear(self, one: _Peer) -> None:
        try:
            message, fds = receive(one.connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(one)
            return
        try:
            if one.making is not None and message:
                self._made(one, message, fds)
            elif message.get("do") in self._do:
                self._do[message["do"]](one, message)
            else:
                self._drop(one)
        except (KeyError, TypeError, ValueError):  # a malformed request ends its connection only
            self._drop(one)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, one: _Peer, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(one.connection, [encode(message)], fds, socket.MSG_NOSIGNAL)
        except OSError:  # gone, or it does not read
            self._drop(one)

    def _drop(self, one: _Peer) -> None:
        """Forget a connection and whatever hung on it."""
        if one.connection.fileno() < 0:
            return
        self._selector.unregister(one.connection)
        one.connection.close()
        if one.pidfd is not None:
            self._selector.unregister(one.pidfd)
            os.close(one.pidfd)
        if one in self._owners:
            self._owners.remove(one)
            if all(other.pid != one.pid for other in self._owners):
                self._leave(one.pid)
        for ray in self._rays:
            ray.waiting = [other for other in ray.waiting if other is not one]
        for name, shared in list(self._shared.items()):
            shared.waiting = [other for other in shared.waiting if other is not one]
            if shared.fd is None and shared.maker is one:
                self._succeed(name, shared)

    # Owners

    def _join(self, one: _Peer, _: dict[str, Any]) -> None:
        self._owners.add(one)
        # The socket alone would not do: a child that the owner forked keeps it open.
        with contextlib.suppress(OSError):
            one.pidfd = os.pidfd_open(one.pid) if one.pid > 0 else None
        if one.pidfd is not None:
            self._watch(one.pidfd, lambda: self._drop(one))
        self._answer(one, {"pid": os.getpid()})

    def _leave(self, pid: int) -> None:
        for name, shared in list(self._shared.items()):
            if shared.fd is not None and pid in shared.holders:
                del shared.holders[pid]
                self._release(name, shared)

    # The private Ray

    def _ask_ray(self, one: _Peer, message: dict[str, Any]) -> None:
        cpus = {int(cpu) for cpu in message.get("cpus", ())}
        if not self._rays or self._rays[-1].dead:
            self._rays.append(_PrivateRay())
        ray = self._rays[-1]
        if ray.where is not None:
            self._answer(one, ray.where)
            return
        ray.waiting.append(one)
        if ray.keeper is None:
            try:
                report = ray.start(cpus)
            except OSError as error:
                why = error.strerror or error
                self._bury(ray, f"the private Ray cannot be started: {why}")
            else:
                self._watch(report, lambda: self._hear_ray(ray, report))

    def _hear_ray(self, ray: _PrivateRay, report: int) -> None:
        """The keeper says where Ray is, or that part of it died; it ends when the keeper does."""
        data = os.read(report, 65536)
        if not data:
            self._selector.unregister(report)
            os.close(report)
            self._bury(ray, ray.death())
        for line in data.splitlines():
            said = json.loads(line)
            if "error" in said:
                self._bury(ray, said["error"])
            else:
                ray.where = said
                waiting, ray.waiting = ray.waiting, []
                for one in waiting:
                    self._answer(one, said)

    def _bury(self, ray: _PrivateRay, why: str) -> None:
        """Tell those who wait; the next to ask gets a new Ray. What still runs of it may go on."""
        ray.dead = True
        waiting, ray.waiting = ray.waiting, []
        for one in waiting:
            self._answer(one, {"error": why})

    def _reap(self, wakeup: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                for ray in self._rays:
                    if ray.keeper == reaped[0]:
                        ray.keeper = None
                        end_children(spare={other.keeper for other in self._rays})

    # Shared descriptors

    def _ask_shared(self, one: _Peer, message: dict[str, Any]) -> None:
        name = str(message["name"])
        shared = self._shared.get(name)
        if shared is None:
            self._shared[name] = _Shared(one)
            self._appoint(name, one)
        elif shared.fd is None:
            shared.waiting.append(one)
            self._answer(one, {"waiting_for": shared.maker.pid})
        else:
            self._hand(shared, one)

    def _appoint(self, name: str, one: _Peer) -> None:
        one.making = name
        self._answer(one, {"make": True})

    def _succeed(self, name: str, shared: _Shared) -> None:
        """The maker is gone: the next in line makes, if there is one."""
        if not shared.waiting:
            del self._shared[name]
            return
        shared.maker = shared.waiting.pop(0)
        self._appoint(name, shared.maker)

    def _made(self, one: _Peer, message: dict[str, Any], fds: list[int]) -> None:
        name, one.making = one.making, None
        shared = self._shared[str(name)]
        if fds and message.get("made"):
            shared.fd = os.dup(fds[0])
            shared.holders[one.pid] += 1
            self._answer(one, {"kept": True})
            for other in shared.waiting:
                self._hand(shared, other)
            shared.waiting = []
        else:
            failed = {"failed": message["failed"]}
            del self._shared[str(name)]
            for other in shared.waiting:
                self._answer(other, failed)

    def _hand(self, shared: _Shared, one: _Peer) -> None:
        assert shared.fd is not None
        shared.holders[one.pid] += 1
        self._answer(one, {"shared": True}, (shared.fd,))

    def _forget(self, one: _Peer, message: dict[str, Any]) -> None:
        name = str(message["name"])
        shared = self._shared.get(name)
        if shared is not None and shared.fd is not None and shared.holders[one.pid]:
            shared.holders[one.pid] -= 1
            self._release(name, shared)
        self._answer(one, {"forgotten": True})

    def _release(self, name: str, shared: _Shared) -> None:
        if shared.fd is not None and shared.holders.total() == 0:
            os.close(shared.fd)
            del self._shared[name]


class _PrivateRay:
    """One Ray of this node: starting, up (``where``), or ``dead``."""

    def __init__(self) -> None:
        self.waiting: list[_Peer] = []
        self.where: dict[str, Any] | None = None
        self.dead = False
        self.keeper: int | None = None
        self._directory: str | None = None
        self._lock: int | None = None
        self._lifeline: int | None = None

    def start(self, cpus: Collection[int] = ()) -> int:
        """Start the keeper, which starts Ray.

        Args:
            cpus: where they run, as far as the control group allows; empty: wherever it does.

        Returns:
            The end of a pipe on which it reports, one JSON object a line.

        Raises:
            OSError: no directory for it, or no process.
        """
        _widen(cpus)
        if few := too_few_processes(LEAST_PROCESSES):
            raise OSError(errno.EAGAIN, few)
        self._directory, self._lock = private_directory()
        listen, self._lifeline = os.pipe()
        report, tell = os.pipe()
        command = [sys.executable, "-P", "-m", "rayloader.head", self._directory]
        try:
            with open(self._log(), "ab") as log:
                started = subprocess.Popen(
                    [*command, str(listen), str(tell)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(listen, tell),
                )
        finally:
            os.close(listen)
            os.close(tell)
        self.keeper = started.pid
        started.returncode = 0  # reaped by the loop, not by subprocess
        return report

    def death(self) -> str:
        """Why Ray is not there, in words, once its keeper has gone."""
        if self.where is not None:
            return "the private Ray of this node died: its keeper process was killed"
        said = ""
        with contextlib.suppress(OSError), open(self._log()) as log:
            said = (log.read().strip().splitlines() or [""])[-1]
        why = too_few_processes(USUAL_PROCESSES) or said or "its process was killed"
        return f"the private Ray did not start: {why}"

    def remove(self) -> None:
        """Remove its directory, once its processes are gone."""
        if self._directory is not None:
            remove(self._directory)

    def _log(self) -> str:
        return f"{self._directory}/start.log"


def end_children(seconds: float = END_SECONDS, spare: Collection[int | None] = ()) -> bool:
    """Kill every child, and whatever they leave behind, until this subreaper has none.

    Only own children are signalled: their ids cannot be reused before they are reaped here.

    Args:
        seconds: after which to give up.
        spare: children that may live.

    Returns:
        Whether all are gone; ``False``: one is stuck in the kernel.
    """
    deadline = time.monotonic() + seconds
    while ending := [pid for pid in _children() if pid not in spare]:
        for pid in ending:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _children() -> list[int]:
    me = str(os.getpid()).encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1] == me:
                    found.append(int(entry))
    return found


def private_directory() -> tuple[str, int]:
    """A new directory for this user only, short enough for Ray, and the lock that marks it used.

    Directories that a killed guardian left behind are removed on the way.

    Raises:
        OSError: no place for temporary files will do; the message says why for each.
    """
    reasons = []
    for place in dict.fromkeys(
        [os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp", "/dev/shm"]
    ):
        try:
            return _directory_in(place)
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
    raise OSError("no directory for temporary files (TMPDIR) can be used: " + "; ".join(reasons))


def _directory_in(place: str) -> tuple[str, int]:
    _sweep(place)
    if not re.fullmatch(r"[A-Za-z0-9_./+-]+", place):
        raise OSError(errno.EINVAL, "Ray does not take such characters in a path")
    if len(os.fsencode(place)) + len(DIRECTORY_PREFIX) + 9 > DIRECTORY_BYTES:
        raise OSError(errno.ENAMETOOLONG, "the path is too long for Ray's sockets")
    directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=place)
    try:
        lock = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, bytes(4096))
        space = os.statvfs(directory)
        if space.f_bavail * space.f_frsize < DIRECTORY_FREE_BYTES:
            raise OSError(errno.ENOSPC, f"less than {DIRECTORY_FREE_BYTES >> 20} MiB are free")
    except OSError:
        remove(directory)
        raise
    return directory, lock


def _sweep(place: str) -> None:
    """Remove directories of this user whose guardian and keeper were both killed."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            if not entry.name.startswith(DIRECTORY_PREFIX):
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    _remove_if_unused(entry.path)


def _remove_if_unused(directory: str) -> None:
    lock = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(directory)
    finally:
        os.close(lock)


def remove(directory: str) -> None:
    """Remove a directory tree, whatever is still being written into it."""
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return
        time.sleep(0.05)


def subreaper() -> None:
    """Make orphaned descendants children of this process; survives ``exec``."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _widen(cpus: Collection[int]) -> None:
    """Take these CPUs, or every one that the control group allows.

    A launcher may have bound the rank that started this to one of them.
    """
    for wanted in (cpus, range(8192)):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, wanted)
            break
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def _signals(terminate: Callable[[], None]) -> int:
    """SIGTERM calls ``terminate``; a child's end wakes the loop. Returns the end to wait on."""
    wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: terminate())
    for ignored in (signal.SIGINT, signal.SIGHUP):  # not SIG_IGN, which children would inherit
        signal.signal(ignored, lambda *_: None)
    return wakeup


def keep(directory: str, lifeline: int, report: int, watched: dict[int, str]) -> NoReturn:
    """The keeper's loop: end everything when the guardian goes, or when the raylet has died.

    A GCS that dies is reported only: readers go on without it.

    Args:
        directory: removed at the end.
        lifeline: a pipe whose other end only the guardian has.
        report: where to write, one JSON object a line.
        watched: the names of the children that matter, by process id.
    """
    ended = False

    def terminate() -> None:
        nonlocal ended
        ended = True

    wakeup = _signals(terminate)
    with selectors.DefaultSelector() as selector:
        selector.register(lifeline, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while not ended:
            if "raylet" in _tell_deaths(report, watched):
                break
            for key, _ in selector.select():
                if key.fd == lifeline:
                    ended = True
                else:
                    os.read(wakeup, 4096)
    end_children()
    remove(directory)
    os._exit(0)


def _tell_deaths(report: int, watched: dict[int, str]) -> list[str]:
    """Reap what has died and report those of it that matter; their names."""
    dead = []
    with contextlib.suppress(ChildProcessError):
        while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
            name = watched.pop(reaped[0], None)
            if name is not None:
                dead.append(name)
                status = os.waitstatus_to_exitcode(reaped[1])
                how = f"signal {-status}" if status < 0 else f"status {status}"
                error = f"the private Ray of this node died: its {name} ended with {how}"
                with contextlib.suppress(OSError):
                    os.write(report, json.dumps({"error": error}).encode() + b"\n")
    return dead


def _bind(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(b"\0" + name.encode())
    listener.listen(_BACKLOG)
    return listener


def main(arguments: list[str]) -> int:
    """Bind the name, go into the background, serve. See the module.

    Returns:
        The exit status of the process that was started: SERVING or LOST_THE_RACE.
    """
    try:
        listener = _bind(arguments[0])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return LOST_THE_RACE
        raise
    if os.fork():
        os._exit(SERVING)
    listener.listen(_BACKLOG)  # again: the peer credentials are now this process's
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    subreaper()
    listener.setblocking(False)
    _Server(listener).serve()
    os._exit(0)


def _main() -> int:
    if sys.argv[1] == "--keep":
        directory, lifeline, report, *processes = sys.argv[2:]
        watched = dict(pair.split("=") for pair in processes)
        keep(
            directory, int(lifeline), int(report), {int(pid): name for pid, name in watched.items()}
        )
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
