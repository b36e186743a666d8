"""What the ranks of one run share on one node: a guardian process, and through it a private Ray.

The first rank that asks starts the guardian (``rayloader.guardian``); binding an abstract socket
named by user and run decides who was first. Every rank that has joined is an owner. When the last
owner is gone, however it went, the guardian ends everything it started, removes its directory and
exits. It also passes file descriptors from one rank to the others.

This module is the ranks' side: it imports neither ray, torch nor numpy.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rayloader.config import GUARDIAN_MESSAGE_BYTES, LEAST_PROCESSES
from rayloader.errors import ClusterError, chained
from rayloader.launch import scrubbed
from rayloader.limits import too_few_processes
from rayloader.sockets import peer

PROTOCOL = 1
"""Ranks and guardian must speak the same; it is part of the socket's name."""
SERVING, LOST_THE_RACE = 0, 3
"""Exit statuses of the process that starts the guardian."""

_RETRY_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class RayAddress:
    """A private Ray, and what is needed to join it.

    Attributes:
        address: ``host:port`` of its GCS.
        token: the secret of this run; never on a command line, never written to a file.
        node_id: the id of its only node, hex.
    """

    address: str
    token: str = dataclasses.field(repr=False)
    node_id: str


class Guardian:
    """One rank's hold on its node's guardian: while it is open, this process is an owner.

    Safe to use from several threads. A forked child does not inherit ownership.
    """

    def __init__(self, run_id: str, lifeline: socket.socket, pid: int) -> None:
        self.run_id = run_id
        self.pid = pid
        self._lifeline: socket.socket | None = lifeline
        _OPEN.add(self)

    @classmethod
    def join(cls, run_id: str | None, timeout: float) -> Guardian:
        """Become an owner, starting the guardian if there is none yet.

        Args:
            run_id: what this run's ranks on this node have in common; ``None``: this process only.
            timeout: until the guardian must have answered [s].

        Raises:
            ClusterError: it cannot be started, or the socket's name belongs to another user.
        """
        run_id = run_id or f"single:{secrets.token_hex(8)}"
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                return cls(run_id, *_become_owner(run_id, deadline))
            except ClusterError:
                raise
            except TimeoutError:
                break
            except ConnectionError:
                pass  # none there yet, or one that is just ending
            _spawn(run_id, deadline)
            time.sleep(_RETRY_SECONDS)
        raise ClusterError(f"no guardian process answered within start_timeout={timeout:g} s")

    def ray(self, timeout: float, cpus: Sequence[int] = ()) -> RayAddress:
        """The node's private Ray, started at the first request.

        Args:
            timeout: until it must be up [s].
            cpus: where its processes run, of the first request; empty: all that the control
                group allows.

        Raises:
            ClusterError: it could not be started, has died, or the guardian is gone.
        """
        what = "the private Ray to start (start_timeout)"
        request = {"do": "ray", "cpus": list(cpus)}
        with self._call(request, timeout, what) as (_, reply, _fds):
            return RayAddress(reply["address"], reply["token"], reply["node_id"])

    def shared(self, name: str, make: Callable[[], int], timeout: float) -> int:
        """A file descriptor that one process of the node makes and all that ask receive.

        The first to ask for ``name`` is told to ``make`` it; the others wait. A maker that dies is
        succeeded by a waiter; a maker that raises passes its error to all who wait, and the next
        to ask tries anew.

        Args:
            name: of the thing, the same on every rank.
            make: returns a descriptor, which the caller of :meth:`shared` then owns.
            timeout: until another's descriptor must have arrived [s]; one's own making is free.

        Returns:
            A descriptor that the caller closes. It stays available here until every process that
            got it has said :meth:`forget` or is gone.

        Raises:
            ClusterError: the guardian is gone, or nobody delivered in time.
            Exception: what ``make`` raised, here or in the rank that made it.
        """
        with self._call({"do": "shared", "name": name}, timeout, repr(name)) as (call, reply, fds):
            if not reply.get("make"):
                return fds[0]
            try:
                made = make()
            except BaseException as error:
                with contextlib.suppress(OSError):
                    _send(call, {"failed": _pack(error)})
                raise
            _send(call, {"made": True}, [made])
            _answer(*_receive(call, time.monotonic() + timeout))
            return made

    def forget(self, name: str) -> None:
        """Say that this process needs no further copy of ``name``. Never fails."""
        with contextlib.suppress(ClusterError), self._call({"do": "forget", "name": name}, 5.0, ""):
            pass

    def check(self) -> None:
        """Do nothing while the guardian lives.

        Raises:
            ClusterError: it is gone.
        """
        if not self.alive():
            raise ClusterError(self._gone())

    def alive(self) -> bool:
        """Whether the guardian still runs, as far as this process can see."""
        if self._lifeline is None:
            return False
        try:
            return self._lifeline.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Stop being an owner. The last one to do so ends what the guardian started."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            lifeline.close()

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _call(
        self, request: Mapping[str, Any], timeout: float, what: str
    ) -> Iterator[tuple[socket.socket, dict[str, Any], list[int]]]:
        """One request on its own connection, so that callers never wait for each other."""
        if self._lifeline is None:
            raise ClusterError("this process has left its guardian (closed, or a forked child)")
        deadline = time.monotonic() + timeout
        maker = None
        try:
            with contextlib.closing(_connect(self.run_id, deadline)) as call:
                _send(call, request)
                reply, fds = _receive(call, deadline)
                while "waiting_for" in reply:
                    maker = reply["waiting_for"]
                    reply, fds = _receive(call, deadline)
                yield call, *_answer(reply, fds)
        except TimeoutError as error:
            by = f" (process {maker} is making it)" if maker else ""
            raise ClusterError(f"waited {timeout:.1f} s in vain for {what}{by}") from chained(error)
        except ConnectionError as error:
            if isinstance(error, ClusterError):
                raise
            raise ClusterError(self._gone()) from error

    def _gone(self) -> str:
        return (
            f"the guardian of this run (process {self.pid}) is gone, and its private Ray with it: "
            "it was killed, or ran out of memory"
        )


def parent_run_id() -> str:
    """A run id for launchers that give none: the parent process, which ranks of a node share."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat", "rb") as file:
            born = file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        born = "?"
    return f"parent:{parent}:{born}"


def socket_name(run_id: str) -> bytes:
    """The abstract address of the guardian of this user's run; at most 107 bytes."""
    digest = hashlib.sha256(f"{PROTOCOL}:{run_id}".encode()).hexdigest()[:24]
    return f"\0rayloader/{os.getuid()}/{digest}".encode()


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as it travels.

    Raises:
        ClusterError: it is longer than GUARDIAN_MESSAGE_BYTES.
    """
    data = json.dumps(message).encode()
    if len(data) > GUARDIAN_MESSAGE_BYTES:
        raise ClusterError(
            f"a message of {len(data)} bytes: at most {GUARDIAN_MESSAGE_BYTES} can be shared"
        )
    return data


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One message and its descriptors; the message is empty at the end of the connection.

    Raises:
        ConnectionError: the peer is gone, or what it says is no message.
    """
    data, fds, _, _ = socket.recv_fds(
        connection, GUARDIAN_MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC
    )
    try:
        message = json.loads(data) if data else {}
        if not isinstance(message, dict):
            raise ValueError("not an object")
    except ValueError as error:
        for fd in fds:
            os.close(fd)
        raise ConnectionError(f"a malformed message: {error}") from error
    return message, list(fds)


def _connect(run_id: str, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.connect(socket_name(run_id))
        _, uid = peer(connection)
        if uid != os.getuid():
            raise ClusterError(f"another user ({uid}) holds the socket of this run")
    except BlockingIOError as error:  # its backlog is full
        connection.close()
        raise ConnectionRefusedError("the guardian is too busy") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _become_owner(run_id: str, deadline: float) -> tuple[socket.socket, int]:
    """A life line to the guardian, and the guardian's process id."""
    lifeline = _connect(run_id, deadline)
    try:
        _send(lifeline, {"do": "join"})
        reply, _ = _answer(*_receive(lifeline, deadline))
        lifeline.setblocking(False)
        return lifeline, int(reply["pid"])
    except BaseException:
        lifeline.close()
        raise


def _send(
    connection: socket.socket, message: Mapping[str, Any], fds: list[int] | None = None
) -> None:
    socket.send_fds(connection, [encode(message)], fds or [], socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket, deadline: float) -> tuple[dict[str, Any], list[int]]:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    message, fds = receive(connection)
    if not message:
        raise ConnectionResetError("the guardian closed the connection")
    return message, fds


def _answer(reply: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
    """The reply, unless it is an error.

    Raises:
        ClusterError: the guardian could not do it.
        Exception: another rank's error.
    """
    if "failed" in reply:
        raise _unpack(reply["failed"])
    if "error" in reply:
        raise ClusterError(reply["error"])
    return reply, fds


def _pack(error: BaseException) -> str:
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # an error that does not pickle still has words
        packed = pickle.dumps(ClusterError(f"{type(error).__name__}: {error}"[:4096]))
    return base64.b64encode(packed).decode()


def _unpack(packed: str) -> BaseException:
    """Another rank's error. It comes from a process of the same user: see SO_PEERCRED."""
    error: BaseException = pickle.loads(base64.b64decode(packed))
    if not isinstance(error, Exception):  # its Ctrl-C is not ours
        error = ClusterError(f"the rank that makes this was interrupted: {error!r}")
    error.add_note("(raised in another rank of this node, which made this for all of them)")
    return error


def _spawn(run_id: str, deadline: float) -> None:
    """Start the guardian; to lose the race against another rank is success.

    Raises:
        ClusterError: it did not come up; the message ends with what it said.
    """
    command = [
        sys.executable,
        "-P",
        "-S",
        "-m",
        "rayloader.guardian",
        socket_name(run_id)[1:].decode(),
    ]
    try:
        started = subprocess.run(
            command,
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=max(deadline - time.monotonic(), 0.001),
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError("the guardian process did not start within start_timeout") from chained(
            error
        )
    except OSError as error:
        why = too_few_processes(LEAST_PROCESSES) or error
        raise ClusterError(f"the guardian process cannot be started: {why}") from error
    if started.returncode not in (SERVING, LOST_THE_RACE):
        said = started.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        why = too_few_processes(LEAST_PROCESSES) or said[-1]
        raise ClusterError(
            f"the guardian process ended with status {started.returncode}, saying: {why}"
        )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the guardian and all that it starts inherit: no rank, and this same rayloader."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    given = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(":") if path]
    return {**scrubbed(environ), "PYTHONPATH": ":".join([here, *given])}


_OPEN: weakref.WeakSet[Guardian] = weakref.WeakSet()


def _close_in_child() -> None:
    for guardian in list(_OPEN):
        guardian.close()


os.register_at_fork(after_in_child=_close_in_child)
