"""The reader's end: one loop that waits for storage, trainer and calls at once."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Container
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from rayloader import arena
from rayloader.arena import Int64s
from rayloader.catalog import Catalog
from rayloader.channel.wire import (
    PACKET_BYTES,
    PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    Kind,
    pack,
    pack_outcome,
    pickled,
    unpack,
    unpack_request,
)
from rayloader.config import Options
from rayloader.errors import ChannelError, RayloaderError
from rayloader.reader import Blocked, Outcome, Reader, Ready, Request
from rayloader.sockets import AT_ONCE, peer
from rayloader.storage.access import Access
from rayloader.tally import Tally, TallyPage

_T = TypeVar("_T")


class Link(Protocol):
    """Where a reader's outcomes go and a trainer's words come from."""

    def descriptors(self) -> list[tuple[int, int]]:
        """(descriptor, poll events) to wait for; what is said makes one readable."""
        ...

    def listen(self, reader: Reader, ready: Container[int]) -> bool:
        """Pass on what the trainer said; False when the trainer is gone.

        Args:
            reader: to pass it on to.
            ready: those of ``descriptors`` that something happened to.
        """
        ...

    def asked(self) -> Request | None:
        """A request that came with the trainer's words, once."""
        ...

    def expects(self, generation: int) -> bool:
        """True when the trainer waits for this request, and has said all about older ones."""
        ...

    def begun(self, generation: int) -> None:
        """What is sent from now on belongs to this request."""
        ...

    def send(self, generation: int, outcomes: list[Outcome]) -> None:
        """Pass on what the reader has."""
        ...


class ReaderLoop:
    """Drives one reader: waits for the storage, the trainer and the actor's calls at once."""

    _SETTLING_SECONDS = 0.005
    _SATED_SECONDS = 0.02
    _WATCH_SECONDS = 1.0

    def __init__(
        self, reader: Reader, storage_fd: int, catalog: Catalog | None, link: Link
    ) -> None:
        """Drive ``reader`` with ``link``; ``catalog`` is what plans without a list refer to."""
        self._reader = reader
        self._catalog = catalog
        self._link = link
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        for fd in (self._wake, storage_fd):
            self._poll.register(fd, select.POLLIN)
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._waiting: tuple[Request, Catalog] | None = None
        self.generation = 0
        """Of the request that is under way."""

    def call(self, action: Callable[[], None]) -> None:
        """Have ``action`` run by the loop; from any thread."""
        self._calls.append(action)
        os.eventfd_write(self._wake, 1)

    def ask(self, question: Callable[[], _T]) -> _T:
        """What ``question`` returns, or raises, when the loop runs it; from any other thread."""
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as failure:  # the asker's, not the loop's
                answer.set_exception(failure)

        self.call(reply)
        return answer.result()

    def abandon(self, generation: int) -> None:
        """Have the loop leave what is older than this request; from any thread."""

        def leave() -> None:
            if self.generation < generation:
                self._reader.abandon()

        self.call(leave)

    def begin(self, request: Request, files: Catalog | None) -> None:
        """Have the loop begin an epoch; from any thread."""
        catalog = files if files is not None else self._known_catalog()
        self.call(lambda: self._accept(request, catalog))

    def run(self) -> None:
        """Work until the trainer is gone."""
        while True:
            if not self._link.listen(self._reader, self._wait()):
                return
            while self._calls:
                self._calls.popleft()()
            if (request := self._link.asked()) is not None:
                self._accept(request, self._known_catalog())
            self._start()
            self._link.send(self.generation, self._reader.advance())

    def _wait(self) -> set[int]:
        """Wait for something to happen; what it happened to.

        While the reader is sated, no word of the trainer wakes it (its end does): it is heard when
        something has been read, or a little later.
        """
        sated, seconds = self._reader.sated, self._WATCH_SECONDS
        for fd, events in self._link.descriptors():
            self._poll.register(fd, events & ~select.POLLIN if sated else events)
        if self._reader.settling:
            seconds = self._SETTLING_SECONDS
        elif sated:
            seconds = self._SATED_SECONDS
        ready = {fd for fd, _ in self._poll.poll(seconds * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return ready

    def _known_catalog(self) -> Catalog:
        if self._catalog is None:
            raise ChannelError("the request names no files and the reader has no catalog")
        return self._catalog

    def _accept(self, request: Request, catalog: Catalog) -> None:
        if request.generation > self.generation:
            self._waiting = (request, catalog)

    def _start(self) -> None:
        if self._waiting is None or not self._link.expects(self._waiting[0].generation):
            return
        request, catalog = self._waiting
        self._waiting = None
        self.generation = request.generation
        self._link.begun(request.generation)
        self._reader.begin(request, catalog)


class SocketLink:
    """The reader's end of the local channel."""

    def __init__(self, connection: socket.socket, trainer_pid: int) -> None:
        """Speak over a connection whose handshake is done."""
        self._connection = connection
        self._pidfd = os.pidfd_open(trainer_pid)
        self._said = 0
        self._asked: Request | None = None
        self._buffer = bytearray(PACKET_BYTES)
        self._view = memoryview(self._buffer)
        self._unsent: collections.deque[bytes] = collections.deque()

    def welcome(self, facts: dict[str, Any]) -> None:
        """Tell the trainer that the reader is there, and what it is."""
        self._connection.send(pack(Kind.WELCOME, payload=json.dumps(facts).encode()))

    def refuse(self, error: RayloaderError) -> None:
        """Tell the trainer, instead of welcoming it, why there is no reader."""
        with contextlib.suppress(OSError):
            self._connection.send(pack(Kind.FAILED, payload=pickled(error)))

    def last_words(self, text: str) -> None:
        """Tell the trainer why the reader ends."""
        with contextlib.suppress(OSError):
            payload = text.encode(errors="replace")[-PAYLOAD_BYTES:]
            self._connection.send(pack(Kind.CRASHED, payload=payload), AT_ONCE)

    def descriptors(self) -> list[tuple[int, int]]:
        """The socket, and the trainer's life."""
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        return [(self._connection.fileno(), events), (self._pidfd, select.POLLIN)]

    def listen(self, reader: Reader, ready: Container[int]) -> bool:
        """Take every packet there is."""
        while True:
            try:
                length = self._connection.recv_into(self._buffer, flags=AT_ONCE)
            except BlockingIOError:
                break
            except OSError:
                return False
            if not length:
                return False
            kind, fields, payload = unpack(self._view[:length])
            try:
                self._obey(reader, kind, fields, payload)
            except ValueError as wrong:
                raise ChannelError(f"{kind.name} {fields} makes no sense: {wrong}") from wrong
        return self._pidfd not in ready

    def asked(self) -> Request | None:
        """The request that came with the last BEGIN."""
        asked, self._asked = self._asked, None
        return asked

    def expects(self, generation: int) -> bool:
        """True after BEGIN with this generation and before the next."""
        return self._said == generation

    def begun(self, generation: int) -> None:
        """Every packet says what it belongs to."""

    def send(self, generation: int, outcomes: list[Outcome]) -> None:
        """Send as much as the socket takes; the rest when it can take more."""
        for outcome in outcomes:
            self._unsent.extend(pack_outcome(generation, outcome))
        while self._unsent:
            try:
                self._connection.send(self._unsent[0], AT_ONCE)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()
                return
            self._unsent.popleft()

    def _obey(self, reader: Reader, kind: Kind, fields: tuple[int, ...], payload: bytes) -> None:
        match kind:
            case Kind.TAKEN:
                reader.taken(fields[0])
            case Kind.RELEASED:
                reader.released(*fields[:2])
            case Kind.HELD:
                reader.hold(*fields[:4])
            case Kind.BEGIN:
                self._said = fields[0]
                self._asked = unpack_request(payload) if payload else None
                self._unsent.clear()
                reader.abandon(fields[1])
            case Kind.CONCURRENCY:
                reader.set_concurrency(Options(concurrency=fields[0]).concurrency)
            case _:
                raise ChannelError(f"a trainer does not say {kind.name} {fields[0]}")


class Attached(NamedTuple):
    """What a trainer brought along."""

    connection: socket.socket
    pid: int
    memory: memoryview
    catalog: Catalog | None
    access: Access | None
    """Where objects are and who asks; ``None``: the trainer reads files only."""


def listen_locally() -> socket.socket:
    """A listening abstract socket with a name nobody can guess."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0rayloader-" + os.urandom(16).hex().encode())
    listener.listen(4)
    return listener


def accept_trainer(listener: socket.socket, deadline: float) -> Attached:
    """Wait for this user's trainer and take its arena and catalog.

    Raises:
        TimeoutError: nobody came before the deadline (``time.monotonic``) [s].
    """
    while True:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        pid, uid = peer(connection)
        if uid != os.getuid():
            connection.close()
            continue
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            return _greeted(connection, pid)
        except BaseException:
            connection.close()
            raise


def _greeted(connection: socket.socket, pid: int) -> Attached:
    """Take what the trainer brings with its HELLO."""
    packet, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES, 2)
    try:
        kind, fields, secret = unpack(packet)
        if kind is not Kind.HELLO or fields[0] != PROTOCOL_VERSION or not fds:
            raise ChannelError(f"the trainer speaks another protocol ({kind.name}, {fields[0]})")
        mapping = arena.map_memory(fds[0])
        arena.populate(mapping)
        catalog = Catalog.from_fd(fds[1]) if len(fds) > 1 else None
        access = Access.loads(secret) if secret else None
    except (ValueError, OSError) as wrong:
        if isinstance(wrong, RayloaderError):
            raise
        raise ChannelError(f"what the trainer brought is no arena: {wrong}") from wrong
    finally:
        for fd in fds:
            os.close(fd)
    connection.settimeout(None)
    return Attached(connection, pid, memoryview(mapping), catalog, access)


class QueueLink:
    """The reader's end of the Ray channel: outcomes wait until the trainer's calls fetch them."""

    def __init__(self, memory: memoryview) -> None:
        """Hand out copies of batches in ``memory``."""
        self._memory = memory
        self._tally = TallyPage(memory)
        self._generation = 0
        self._begun = False
        self._outcomes: dict[int, Outcome] = {}
        self._next = self._taken = 0
        self._arrived = threading.Condition()

    def descriptors(self) -> list[tuple[int, int]]:
        """None: the actor's calls wake the loop."""
        return []

    def listen(self, reader: Reader, ready: Container[int]) -> bool:
        """Nothing is said here; Ray ends this process with its trainer."""
        return True

    def asked(self) -> Request | None:
        """None: every request is a call of the actor."""
        return None

    def expects(self, generation: int) -> bool:
        """True unless the trainer has left this request already."""
        return generation >= self._generation

    def begun(self, generation: int) -> None:
        """Outcomes count anew; whoever waits for an older request's is told that it is over."""
        with self._arrived:
            if self._generation < generation or not self._begun:
                self._generation, self._next, self._taken = generation, 0, 0
                self._outcomes.clear()
                self._begun = True
            self._arrived.notify_all()

    def abandon(self, generation: int) -> None:
        """The trainer has left all requests before this one."""
        with self._arrived:
            if self._generation < generation:
                self._generation, self._begun = generation, False
                self._outcomes.clear()
            self._arrived.notify_all()

    def send(self, generation: int, outcomes: list[Outcome]) -> None:
        """Keep the outcomes until they are fetched.

        A fetched batch leaves the arena at once, so nobody need hear that the reader is blocked.
        """
        with self._arrived:
            for outcome in outcomes:
                if isinstance(outcome, Blocked):
                    continue
                self._outcomes[self._next] = outcome
                self._next += 1
            if outcomes:
                self._arrived.notify_all()

    def take(
        self, generation: int, index: int, counted: Tally, loop: ReaderLoop, reader: Reader
    ) -> Fetched | None:
        """Wait for outcome ``index`` of a request; ``None`` when a newer request has come.

        Args:
            generation: of the request.
            index: of the outcome, from 0.
            counted: by the trainer since its last call.
            loop: the reader's.
            reader: whose outcomes these are.
        """
        loop.call(lambda: self._tally.add(counted))
        with self._arrived:
            self._arrived.wait_for(
                lambda: (
                    self._generation > generation
                    or (self._generation == generation and index in self._outcomes)
                )
            )
            if self._generation > generation:
                return None
            outcome = self._outcomes.pop(index)
        page = np.frombuffer(self._memory, np.int64, arena.HEADER_BYTES // 8)
        if not isinstance(outcome, Ready):
            return Fetched(outcome, None, None, page.copy())
        table, data = _copied_out(self._memory, outcome)

        def give_back() -> None:
            if loop.generation == generation:  # else its room is free already
                self._taken += 1
                reader.taken(self._taken)
                reader.released(generation, outcome.table_at)

        loop.call(give_back)
        return Fetched(outcome, table, data, page.copy())


class Fetched(NamedTuple):
    """One outcome as it travels through Ray's object store."""

    outcome: Outcome
    table: Int64s | None
    data: np.ndarray | None
    page: Int64s


def _copied_out(memory: memoryview, ready: Ready) -> tuple[Int64s, np.ndarray]:
    """A batch's table and bytes, gathered into memory of their own."""
    table = arena.read_table(memory, ready.table_at, ready.samples)
    root = np.frombuffer(memory, np.uint8)
    return arena.gathered(table, root)
