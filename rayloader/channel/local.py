"""The trainer's end of the local channel: the arena it owns, and the socket to the reader."""

from __future__ import annotations

import array
import collections
import json
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rayloader import arena
from rayloader.arena import Int64s
from rayloader.channel import Delivery, ReaderGone, ReaderProcess
from rayloader.channel.wire import (
    PACKET_BYTES,
    PROTOCOL_VERSION,
    Kind,
    pack,
    pack_request,
    unpack,
    unpickled,
)
from rayloader.config import ROOM_SECONDS
from rayloader.errors import BatchTooLarge, ChannelError, ReaderLost
from rayloader.reader import Ended, ReaderCounts, Request, Warned
from rayloader.receipt import Fingerprint, Skipped
from rayloader.sockets import AT_ONCE, peer
from rayloader.storage.access import Access
from rayloader.tally import TallyPage

_WAIT = struct.pack("@ll", 1, 0)
"""How long one receive waits, as a ``timeval`` [s, µs]."""
_CRASH_LINES = 16
"""Of a crashed reader's traceback, at most so much is shown [lines]."""


class TrainerMemory:
    """The arena as its owner, the trainer, sees it: which batches live, and who must know."""

    def __init__(self, length: int) -> None:
        """Make and map ``length`` bytes."""
        self.length = length
        self.fd = arena.create_memory(length)
        try:
            self.memory = memoryview(arena.map_memory(self.fd))
        except BaseException:
            os.close(self.fd)
            raise
        self.root = np.frombuffer(self.memory, np.uint8)
        self.page = np.frombuffer(self.memory, np.int64, arena.HEADER_BYTES // 8)
        self.tally = TallyPage(self.memory)
        self._live: dict[int, _Lease] = {}
        self._connection: socket.socket | None = None
        self._backlog: collections.deque[bytes] = collections.deque()
        self._interruption: BaseException | None = None
        self._pid = os.getpid()

    def lease(
        self, generation: int, table_at: int, length: int, samples: int, span: tuple[int, int]
    ) -> np.ndarray:
        """A fresh array over ``span``; the batch is released when its last user drops it."""
        data = self.root[slice(*span)]
        lease = _Lease(data, self._dropped)
        lease.batch = (generation, table_at, length, samples)
        lease.nbytes = len(data)
        self._live[id(lease)] = lease
        return data

    @property
    def held_bytes(self) -> int:
        """Bytes of all batches that live [bytes]."""
        return sum(lease.nbytes for lease in list(self._live.values()))

    def connect(self, connection: socket.socket) -> list[tuple[int, int, int, int]]:
        """From now on this reader is told of releases.

        Returns:
            What is held already, and must be told too: (generation, table_at, length, samples). One
            that is dropped before that is released before it is announced, as the reader expects.
        """
        self._backlog.clear()
        self._connection = connection
        return [lease.batch for lease in list(self._live.values())]

    def disconnect(self) -> None:
        """No reader any more: drops need not be told."""
        self._connection = None

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with its last view."""
        self.disconnect()
        os.close(self.fd)

    def release(self, generation: int, table_at: int) -> None:
        """Tell the reader that a batch is free. Never blocks, never raises: see ``_dropped``."""
        packet = pack(Kind.RELEASED, generation, table_at)
        connection = self._connection
        if connection is None:
            return
        try:
            connection.send(packet, AT_ONCE)
        except BlockingIOError:
            self._backlog.append(packet)
        except OSError:
            pass  # the reader is gone; its successor is told what is held

    def flush(self) -> None:
        """Send the releases that found the socket full, as far as it takes them now.

        Raises:
            BaseException: what interrupted a release, mostly KeyboardInterrupt.
        """
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption
        while self._backlog and self._connection is not None:
            packet = self._backlog.popleft()
            try:
                self._connection.send(packet, AT_ONCE)
            except BlockingIOError:
                self._backlog.appendleft(packet)
                return
            except OSError:
                pass  # see release()

    def _dropped(self, lease: Any) -> None:
        """A batch's array is gone. Runs in any thread, inside garbage collection: no locks.

        A forked child drops its copies too, which says nothing about the trainer's. What a signal
        raises in here Python would print and forget; it is kept for the trainer's next step.
        """
        try:
            if os.getpid() == self._pid and self._live.pop(id(lease), None) is not None:
                self.release(*lease.batch[:2])
        except BaseException as interruption:
            self._interruption = interruption

    def sweep(self) -> None:
        """Release what was dropped when a signal kept :meth:`_dropped` from beginning."""
        for lease in list(self._live.values()):
            if lease() is None:
                self._dropped(lease)


class _Lease(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a batch's array that knows where the batch lies."""

    __slots__ = ("batch", "nbytes")
    batch: tuple[int, int, int, int]
    """(generation, where its table is, length of its one extent or 0, samples)."""
    nbytes: int


_OPEN_CHANNELS: weakref.WeakSet[LocalChannel] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child must not keep the trainer's life line open."""
    for channel in list(_OPEN_CHANNELS):
        channel.sever()


os.register_at_fork(after_in_child=_close_in_child)


class LocalChannel:
    """The trainer's end of the local channel."""

    name = "local"
    _POLL_SECONDS = 1.0

    def __init__(
        self,
        address: str,
        memory: TrainerMemory,
        catalog_fd: int | None,
        *,
        timeout: float,
        tell_taken: bool,
        on_demand: bool = False,
        access: Access | None = None,
    ) -> None:
        """Connect to a reader and hand it the arena and the catalog.

        Args:
            address: the reader's abstract socket, without its leading NUL.
            memory: the arena; what is held in it is announced to the reader.
            catalog_fd: a descriptor of the saved catalog, or ``None``.
            timeout: the reader must answer within this [s].
            tell_taken: tell the reader of each batch taken, as a bounded read-ahead needs.
            on_demand: tell it only when the next one is asked for: nothing is read ahead.
            access: where objects are and who asks, for a reader of objects.

        Raises:
            OSError: the socket cannot be reached from here.
            ReaderGone: the reader died before it had said that it is there.
            ReaderLost: it did not say so within ``timeout``.
            ChannelError: who listens is not this user's reader.
        """
        self._memory = memory
        self._generation = self._taken = 0
        self._tell_taken = tell_taken
        self._on_demand = on_demand
        self._untold = False
        self._blocked: tuple[float, int, int] | None = None
        self._skipped: list[Skipped] = []
        self._buffer = bytearray(PACKET_BYTES)
        self._view = memoryview(self._buffer)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(timeout)
        self._process: ReaderProcess | None = None
        try:
            self._connection.connect("\0" + address)
            pid, uid = peer(self._connection)
            if uid != os.getuid():
                raise ChannelError(f"user {uid} listens where this user's reader should")
            try:
                self._process = ReaderProcess(pid)
                self.welcome = self._greet(catalog_fd, access)
            except TimeoutError as mute:
                raise ReaderLost(f"the reader did not answer within {timeout:g} s") from mute
            except OSError as gone:
                raise ReaderGone(f"the reader died while starting ({gone.strerror})") from gone
            self._connection.settimeout(None)
            # One system call waits and receives; a timeout of Python's would make it two.
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _WAIT)
            for held in memory.connect(self._connection):
                self._say(Kind.HELD, *held)
        except BaseException:
            memory.disconnect()
            self.sever()
            raise
        _OPEN_CHANNELS.add(self)

    def begin(self, request: Request) -> bool:
        """What comes from now on belongs to this request; a share of the catalog goes along."""
        payload = pack_request(request)
        self._begin(request.generation, payload)
        return bool(payload)

    def abandon(self, generation: int) -> None:
        """Have the reader leave what is older."""
        self._begin(generation, b"")

    def _begin(self, generation: int, payload: bytes) -> None:
        self._memory.sweep()
        self._say(Kind.BEGIN, generation, self._taken, payload=payload)
        self._generation, self._taken, self._blocked = generation, 0, None
        self._untold = False
        self._skipped = []

    def receive(self, on_wait: Callable[[], None]) -> Delivery | Ended | Warned:
        """Wait for the next thing of this request."""
        self._memory.flush()
        if self._untold:
            self._untold = False
            self._say(Kind.TAKEN, self._taken)
        while True:
            kind, fields, payload = self._next_packet(on_wait)
            if fields[0] != self._generation:
                continue
            match kind:
                case Kind.READY:
                    self._blocked = None
                    return self._take(fields)
                case Kind.SKIPPED:
                    self._skipped.append(_skipped(payload))
                case Kind.ENDED:
                    return Ended(fields[1])
                case Kind.WARNED:
                    return Warned(payload.decode(errors="replace"))
                case Kind.FAILED:
                    raise unpickled(payload)
                case Kind.BLOCKED:
                    self._blocked = (time.monotonic(), fields[2], self._memory.held_bytes)
                case _:
                    raise ReaderGone(f"the reader said {kind.name}, which no reader says")

    def counts(self) -> ReaderCounts | None:
        """The counters in the arena's first page."""
        counts = ReaderCounts.of(self._memory.page)
        return counts if counts.generation == self._generation else None

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight [reads]."""
        self._say(Kind.CONCURRENCY, concurrency)

    def kill(self) -> bool:
        """End the reader's process, stopped or not; False when it does not end."""
        return self._process is None or self._process.pidfd < 0 or self._process.kill()

    def close(self) -> None:
        """Let the reader go."""
        _OPEN_CHANNELS.discard(self)
        self._memory.disconnect()
        self.sever()

    def sever(self) -> None:
        """Close the descriptors of this process."""
        self._connection.close()
        if self._process is not None:
            self._process.close()

    def _greet(self, catalog_fd: int | None, access: Access | None) -> dict[str, Any]:
        fds = [self._memory.fd] + ([catalog_fd] if catalog_fd is not None else [])
        secret = access.dumps() if access is not None else b""
        hello = pack(Kind.HELLO, PROTOCOL_VERSION, payload=secret)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        self._connection.sendmsg([hello], [rights])
        packet = self._connection.recv(PACKET_BYTES)
        if not packet:
            raise ReaderGone("the reader died while starting")
        kind, _, payload = unpack(packet)
        if kind is Kind.FAILED:
            raise unpickled(payload)
        if kind is not Kind.WELCOME:
            raise ChannelError(f"the reader answered {kind.name} to HELLO")
        try:
            welcome: dict[str, Any] = json.loads(payload)
            return {name: welcome[name] for name in ("pid", "engine", "client", "affinity")}
        except (ValueError, TypeError, KeyError) as wrong:
            raise ChannelError(f"the reader's WELCOME makes no sense: {wrong!r}") from wrong

    def _say(self, kind: Kind, *fields: int, payload: bytes = b"") -> None:
        """Tell the reader; one that is stopped takes nothing and must not be waited for."""
        packet = pack(kind, *fields, payload=payload)
        while True:
            try:
                self._connection.send(packet, AT_ONCE)
                return
            except BlockingIOError:
                self._wait_to_say()
            except OSError as gone:
                raise ReaderGone(f"the reader's socket is closed ({gone.strerror})") from gone

    def _wait_to_say(self) -> None:
        assert self._process is not None
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        if not writable.poll(self._POLL_SECONDS * 1000):
            self._process.require_running()

    def _next_packet(self, on_wait: Callable[[], None]) -> tuple[Kind, tuple[int, ...], bytes]:
        while True:
            try:
                length = self._connection.recv_into(self._buffer)
            except BlockingIOError:  # nothing came within _WAIT
                self._look_around(on_wait)
                continue
            except OSError as gone:
                raise ReaderGone(f"the reader's socket broke ({gone.strerror})") from gone
            if length == 0:
                raise ReaderGone("the reader has ended")
            try:
                kind, fields, payload = unpack(self._view[:length])
            except ChannelError as wrong:
                raise ReaderGone(f"the reader cannot be understood: {wrong}") from wrong
            if kind is Kind.CRASHED:
                raise _crashed(payload.decode(errors="replace"))
            return kind, fields, payload

    def _look_around(self, on_wait: Callable[[], None]) -> None:
        """Nothing has come for a while. The reader's death ends its socket, or shows here."""
        assert self._process is not None
        self._process.require_running()
        self._memory.sweep()
        self._memory.flush()
        self._require_room()
        on_wait()

    def _take(self, fields: tuple[int, ...]) -> Delivery:
        generation, step, table_at, length, samples, nbytes, content, order = fields
        names = Fingerprint(samples, content, order)
        memory = self._memory
        try:
            table = arena.read_table(memory.memory, table_at, samples)
            if not 0 <= length <= memory.length - table_at:
                raise ValueError(f"{length} bytes at {table_at} end outside the arena")
        except (ValueError, TypeError) as wrong:
            raise ReaderGone(f"the reader's batch {step} makes no sense: {wrong}") from wrong
        span = _span(table, table_at, length)
        skipped, self._skipped = self._skipped, []
        private = 2 * (memory.held_bytes + (length or nbytes)) > memory.length
        if private:
            table, data = arena.gathered(table, memory.root)
            self._taken += 1
            memory.release(generation, table_at)
        else:
            if samples and table[0, 0] != arena.NOT_DELIVERED:
                table[:, 0] -= span[0]
            self._taken += 1
            data = memory.lease(generation, table_at, length, samples, span)
        if self._on_demand:
            self._untold = True
        elif self._tell_taken:
            self._say(Kind.TAKEN, self._taken)
        return Delivery(step, data, table, nbytes, names, skipped, private)

    def _require_room(self) -> None:
        """Whoever holds batches must drop some, maybe in another thread; but not for ever."""
        if self._blocked is None:
            return
        since, needed, held_then = self._blocked
        held = self._memory.held_bytes
        if held == held_then and time.monotonic() - since > ROOM_SECONDS:
            raise BatchTooLarge(
                f"the next batch needs {needed:,} bytes and finds no room; the batches still held "
                f"take {held:,} of {self._memory.length:,}: drop or clone() them, or "
                f"set memory_bytes to at least {2 * (held + needed):,}"
            )


def _skipped(payload: bytes) -> Skipped:
    try:
        return Skipped(*json.loads(payload))
    except (ValueError, TypeError) as wrong:
        raise ReaderGone(f"the reader's list of skipped samples makes no sense: {wrong}") from wrong


def _crashed(trace: str) -> ReaderGone:
    """A reader's last words: why it ended, and where, as a note."""
    lines = trace.strip().splitlines() or ["it does not say why"]
    gone = ReaderGone(f"the reader crashed: {lines[-1]}")
    gone.add_note("\n".join(lines[-_CRASH_LINES:]))
    return gone


def _span(table: Int64s, table_at: int, length: int) -> tuple[int, int]:
    """[lo, hi) that one array must span to see every sample of a batch."""
    if length:
        return table_at, table_at + length
    delivered = table[table[:, 0] != arena.NOT_DELIVERED]
    if not len(delivered):
        return table_at, table_at + 1
    return int(delivered[:, 0].min()), int((delivered[:, 0] + delivered[:, 1]).max())
