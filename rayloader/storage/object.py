"""Objects of an S3 or Azure storage, read by one of three clients.

One thread runs an asyncio loop and sees to everything that is under way. Each object of up to
``part_bytes`` is one GET. A larger object is read as ranges, between two HEADs whose ETags must
agree: so all ranges are of one version. Where no size is known, a small object is read by one range
that is larger than it, which also tells its size.

From an endpoint of plain HTTP a client of rayloader's own reads straight into place, objects and
ranges: each GET in a thread, which sees to what follows from its end by itself, as far as that
needs no loop. All else is s3dlio's, and so is everything from another endpoint, but for what
follows.

s3dlio writes an object straight to its place in the caller's memory, with the size that was listed
as its condition. But a call of it costs more than the copying of a few hundred kilobytes, and more
than twice what one of obstore's costs. So small objects are read through obstore, by a range that
is one byte longer than they should be, and copied into place. What obstore cannot spell or does not
tell is s3dlio's. Without obstore small objects are asked for a few per call of s3dlio, several
calls at once, unless one by one brings more. A call for several fails as a whole; then its objects
are read one by one, which says what is wrong.

Requests are sent again here and nowhere else: the clients' own repetitions are turned off. (But a
connection that the server had closed before it was used again is replaced.) How many are in flight
is the caller's ceiling, and less while the storage throttles or does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rayloader.config import FIRST_ANSWER_SECONDS, PAGE, REQUESTS_END_SECONDS
from rayloader.errors import (
    DirectUnsupported,
    ObjectNotFound,
    OptionError,
    RangeIgnored,
    Replaced,
    StorageError,
    Throttled,
    TimedOut,
    Truncated,
    Unreachable,
    UsageError,
)
from rayloader.storage import (
    DROP,
    LATENCY_BUCKETS,
    SKIP,
    Counters,
    Keys,
    Progress,
    StorageSpec,
    latency_bucket,
)
from rayloader.storage._calls import (
    Stage,
    attachable,
    fetchable,
    require_places,
    require_unused,
    require_usable,
)
from rayloader.storage._requests import Group, Kind, Op, Version, Way
from rayloader.storage.access import Access
from rayloader.storage.callers import Call, Callers
from rayloader.storage.http_client import Found, HttpClient, Unspoken, reaches
from rayloader.storage.object_errors import Failure, made, of_http, of_obstore, of_s3dlio
from rayloader.storage.obstore_client import ObstoreClient, is_installed, open_obstore
from rayloader.storage.pacing import Bundling, Window
from rayloader.storage.s3dlio_client import Client, open_client
from rayloader.storage.uri import joined

_TICK_SECONDS = 0.1
"""Between two looks for requests that take too long [s]."""
_LINGER_SECONDS = 0.002
"""While there is room for fewer objects than are asked for per call, and more are wanted, so much
is waited for more room. Without it, calls that once were small would stay so [s]."""
_BUNDLE_SECONDS = 2.0
"""A call for several objects that has not ended by then is given up: one of them keeps the others
waiting [s]."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Before a request is sent again: doubled each time, of which a random half is waited [s]."""


_log = logging.getLogger(__name__)


def _in_turn(method: Callable[..., None]) -> Callable[..., None]:
    """Whoever calls it has the storage's turn meanwhile."""

    @functools.wraps(method)
    def in_turn(self: ObjectStorage, *arguments: Any, **more: Any) -> None:
        with self._turn:
            method(self, *arguments, **more)
        self._look_back()

    return in_turn


def open_objects(spec: StorageSpec) -> ObjectStorage:
    """Open the storage of ``s3://`` and ``az://`` objects.

    Raises:
        OptionError: s3dlio is not installed, or obstore is not and was asked for.
        UsageError: this process has used s3dlio for somebody else already, or was forked from one
            that had used it.
    """
    access = spec.access if spec.access is not None else Access()
    if spec.scheme != "s3":
        return ObjectStorage(spec, access, open_client(access))
    access = access.with_keys()
    client = open_client(access)
    if object_engine(spec.client, access) == "http":
        return ObjectStorage(spec, access, client, straight=HttpClient(access))
    if spec.client == "http":
        raise OptionError(
            f"client='http' reads from an endpoint of http://HOST:PORT, with keys of plain ASCII "
            f"and no proxy between, not from {access.destination}: set endpoint_url, or "
            f"client='auto'"
        )
    quick = None
    if spec.client != "s3dlio":
        quick = open_obstore(access, required=spec.client == "obstore")
    return ObjectStorage(spec, access, client, quick)


def object_engine(client: str, access: Access) -> str:
    """What reads S3 objects with this option ``client``, as receipts name it."""
    if client in ("auto", "http") and reaches(access):
        return "http"
    return "s3dlio" if client == "s3dlio" or not is_installed() else "obstore"


class ObjectStorage:
    """A ``BulkReader`` of objects. Roots and keys are as ``rayloader.storage.uri`` has them."""

    def __init__(
        self,
        spec: StorageSpec,
        access: Access,
        client: Client,
        quick: ObstoreClient | None = None,
        straight: HttpClient | None = None,
    ) -> None:
        """Use ``client``; read through ``straight``, or what is small through ``quick``.

        The loop's thread starts now.
        """
        self.engine = "http" if straight else "obstore" if quick else "s3dlio"
        self._spec = spec
        self._access = access
        self._client = client
        self._quick = quick
        self._straight = straight
        self._pid = os.getpid()
        self._closed = False
        self._memory: memoryview | None = None
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        """Guards what the owner's thread and others look at: groups' ``running`` and ``discarded``,
        and these."""
        self._groups: dict[int, Group] = {}
        self._done: dict[int, Group] = {}
        self._leaving: set[Group] = set()
        self._in_flight: dict[Op, None] = {}
        """In the order in which they were sent."""
        self._pausing: dict[Op, None] = {}
        """Before they are sent again."""
        self._defect: BaseException | None = None
        self._turn = threading.RLock()
        """Guards what follows: the loop's thread has it, or one whose call has just ended."""
        self._queue: deque[Op] = deque()
        self._window = Window(spec.concurrency)
        self._bundling = Bundling()
        self._beside = 0
        """Beside the attached memory, in flight to be copied there, or peeked at and held until it
        is fetched; within ``ranges_bytes`` [bytes]."""
        self._may_be_small = True
        """The last object of unknown size was one that a peek gets whole."""
        self._answered = False
        self._ticking = False
        self._lingering: asyncio.TimerHandle | None = None
        self._reading = 0
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._back: deque[tuple[Op, Call]] = deque()
        """Calls that threads have ended, to be seen to by whoever has the turn."""
        # Counters.
        self._metadata_ops = self._reads = self._bytes_transferred = 0
        self._retries = self._throttled = self._fallback = 0
        self._read_seconds = 0.0
        self._peak = 0
        self._latency = [0] * LATENCY_BUCKETS
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_remember_defect(weakref.ref(self)))
        self._callers = Callers()
        self._thread = threading.Thread(
            target=_run, args=(self._loop,), name="rayloader-objects", daemon=True
        )
        self._thread.start()
        # Also without close, and when the interpreter ends: threads must not outlive their owner.
        self._end = weakref.finalize(
            self,
            _shut_down,
            self._loop,
            self._thread,
            self._callers,
            straight,
            self._in_flight,
            self._pid,
        )

    # ---- the protocol, in the owner's thread

    def fileno(self) -> int:
        """See ``BulkReader``."""
        self._check()
        return self._event

    def attach(self, memory: memoryview) -> None:
        """See ``BulkReader``."""
        self._check()
        view = self._memory = attachable(self._memory, memory)
        self._bytes = np.frombuffer(view, np.uint8)

    def measure(self, group: int, root: bytes, keys: Keys) -> None:
        """See ``BulkReader``. One HEAD for each object; with ``peek`` one GET, if it is small."""
        self._check()
        require_unused(group, self._groups)
        new = self._groups[group] = Group(group, root, keys, None)
        self._loop.call_soon_threadsafe(self._begin_measure, new)

    def fetch(self, group: int, places: npt.NDArray[np.int64]) -> None:
        """See ``BulkReader``."""
        self._check()
        known = fetchable(group, self._groups, self._done)
        known.places = self._places(known, places)
        known.stage = Stage.FETCHING
        self._loop.call_soon_threadsafe(self._begin_fetch, known)

    def read(
        self,
        group: int,
        root: bytes,
        keys: Keys,
        sizes: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        """See ``BulkReader``. No HEAD: an object that was listed otherwise fails."""
        self._check()
        require_unused(group, self._groups)
        if not len(sizes) == len(places) == keys.n:
            raise UsageError("a group has as many sizes and places as names")
        new = Group(group, root, keys, sizes)
        new.places = self._places(new, places)
        new.stage = Stage.FETCHING
        self._groups[group] = new
        self._loop.call_soon_threadsafe(self._begin_read, new)

    def returns_at_once(self) -> bool:
        """See ``BulkReader``: it never does."""
        return False

    def discard(self, group: int) -> None:
        """See ``BulkReader``. Requests in flight end as they would have; nobody waits for them."""
        self._check()
        with self._lock:
            gone = self._groups.pop(group, None)
            self._done.pop(group, None)
            if gone is not None:
                gone.discarded = True
                if gone.running:
                    self._leaving.add(gone)
                if self._spec.peek:
                    self._loop.call_soon_threadsafe(self._forget_peeked, gone)

    def settled(self, group: int | None = None) -> bool:
        """See ``BulkReader``."""
        self._check()
        with self._lock:
            return not any(group in (None, leaving.number) for leaving in self._leaving)

    def collect(self) -> list[Progress]:
        """See ``BulkReader``."""
        self._check()
        if self._defect is not None:
            raise self._defect
        with self._lock:
            done, self._done = self._done, {}
            for number, group in done.items():
                if group.stage is Stage.FETCHED:
                    del self._groups[number]
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
        return [group.progress() for group in done.values()]

    def set_concurrency(self, concurrency: int) -> None:
        """See ``BulkReader``."""
        self._check()
        if concurrency < 1:
            raise UsageError(f"concurrency={concurrency}: must be at least 1")
        self._loop.call_soon_threadsafe(self._set_ceiling, concurrency)

    def counters(self) -> Counters:
        """See ``BulkReader``."""
        self._check()
        return Counters(
            metadata_ops=self._metadata_ops,
            reads=self._reads,
            bytes_transferred=self._bytes_transferred,
            retries=self._retries,
            read_seconds=self._read_seconds,
            peak_in_flight=self._peak,
            in_flight=self._reading,
            latency=tuple(self._latency),
            direct_fallback_files=self._fallback,
            throttled=self._throttled,
        )

    def reset_peak(self) -> None:
        """See ``BulkReader``."""
        self._check()
        self._peak = self._reading

    def oldest_read(self) -> tuple[float, str]:
        """See ``BulkReader``. A request that is sent again is as old as when it was first sent."""
        self._check()
        with self._lock:
            wanted = (op for op in (*self._in_flight, *self._pausing) if not op.group.discarded)
            oldest = min(wanted, key=lambda op: op.first, default=None)
        if oldest is None:
            return 0.0, ""
        age = time.perf_counter() - oldest.first
        return max(age, 1e-9), oldest.group.name(oldest.index)

    def close(self) -> None:
        """See ``BulkReader``. Requests in flight are given up. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._end()
        # In a forked child the turn may be that of a thread which was not copied.
        with self._turn if self._pid == os.getpid() else contextlib.nullcontext():
            os.close(self._event)
        self._bytes = np.empty(0, np.uint8)
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # a request still writes
                self._memory.release()

    def _check(self) -> None:
        require_usable(self._closed, self._pid)

    def _places(self, group: Group, places: npt.NDArray[np.int64]) -> list[int]:
        return require_places(group, places, len(self._bytes), bool(self._spec.direct))

    # ---- by turns: in the loop's thread, but for what :meth:`_came` leads to

    @_in_turn
    def _begin_measure(self, group: Group) -> None:
        self._refuse(group)
        for i in range(group.n):
            if i not in group.failures:
                group.unfinished += 1
                self._queue.append(Op(group, i, Kind.PEEK, 0, self._peek_bytes))
        if not group.unfinished:
            self._complete(group)
        self._pump()

    @_in_turn
    def _begin_read(self, group: Group) -> None:
        self._refuse(group)
        for i in group.failures:
            group.places[i] = SKIP
        self._begin_fetch(group)

    def _refuse(self, group: Group) -> None:
        """Let what cannot be asked for fail at once."""
        for i in range(group.n):
            if group.stage is Stage.FETCHING and group.places[i] == SKIP:
                continue
            if self._spec.direct is True:
                group.failures[i] = DirectUnsupported(
                    group.name(i), "object storage has no O_DIRECT"
                )
            elif why := _not_a_name(joined(group.root, group.keys.key(i))):
                group.failures[i] = made(ObjectNotFound, group.name(i), why, self._access)
            self._fallback += self._spec.direct == "fallback"
        for i in group.failures:
            group.sizes[i] = -1

    @_in_turn
    def _begin_fetch(self, group: Group) -> None:
        for i, place in enumerate(group.places):
            if place == SKIP or i in group.peeked:
                continue
            group.unfinished += 1
            if group.sizes[i] <= self._part(place):
                self._queue.append(Op(group, i, Kind.WHOLE, 0, group.sizes[i]))
            elif i in group.versions:
                self._queue.extend(self._ranges(group, i))
            else:
                self._queue.append(Op(group, i, Kind.PIN))
        if group.peeked:
            self._put_peeked(group)
            self._drop_peeked(group)
        if not group.unfinished:
            self._complete(group)
        self._pump()

    def _part(self, place: int) -> int:
        """Length of one request of an object that goes there [bytes]."""
        spec = self._spec
        if place != DROP:
            return spec.part_bytes
        return max(PAGE, min(spec.part_bytes, spec.scratch_bytes // self._window.ceiling))

    def _ranges(self, group: Group, index: int) -> Iterator[Op]:
        """Requests for all of a large object; those in flight stay within ``ranges_bytes``."""
        size = group.sizes[index]
        step = self._part(group.places[index])
        if self._straight is None:
            step = min(step, self._range_bytes)
        group.parts_left[index] = -(-size // step)
        for offset in range(0, size, step):
            yield Op(group, index, Kind.RANGE, offset, min(step, size - offset))

    @property
    def _range_bytes(self) -> int:
        """What one request may bring to be copied into place [bytes]."""
        each = self._spec.ranges_bytes // max(2, self._window.ceiling)
        return max(PAGE, each // PAGE * PAGE)

    @property
    def _peek_bytes(self) -> int:
        """What one peek may bring: less than a range, because it is held a while [bytes]."""
        return min(self._spec.part_bytes, max(PAGE, self._range_bytes // 2))

    def _may_peek(self) -> bool:
        spec = self._spec
        return (
            spec.peek
            and spec.scheme == "s3"
            and self._may_be_small
            and self._has_room_for(self._peek_bytes, self._range_bytes)
        )

    def _has_room_for(self, length: int, reserve: int) -> bool:
        """Whether so much may arrive beside the attached memory [bytes].

        What is no range can be had otherwise, and leaves room for one: so ranges go on, however
        much has been peeked at and waits until somebody fetches it.
        """
        return self._beside + length + reserve <= self._spec.ranges_bytes

    def _put_peeked(self, group: Group) -> None:
        """Put what measuring has brought into its places."""
        with self._lock:
            if group.discarded:
                return
            group.running += 1  # its memory stays its own meanwhile
        for i, data in group.peeked.items():
            if group.places[i] != SKIP:
                self._put(data, group.places[i])
        with self._lock:
            self._stopped_running(group)

    @_in_turn
    def _forget_peeked(self, group: Group) -> None:
        self._drop_peeked(group)

    def _drop_peeked(self, group: Group) -> None:
        self._beside -= sum(map(len, group.peeked.values()))
        group.peeked.clear()

    @_in_turn
    def _set_ceiling(self, concurrency: int) -> None:
        self._window.set_ceiling(concurrency)
        self._pump()

    def _pump(self, *, linger: bool = True) -> None:
        """Send what the window has room for."""
        while self._queue and self._room > 0 and not self._closed:
            op = self._queue[0]
            self._choose(op)
            if op.kind is Kind.RANGE and op.beside > self._range_bytes:
                self._cut(self._queue.popleft())
                continue
            if op.kind is Kind.RANGE and self._in_flight and not self._has_room_for(op.beside, 0):
                break  # until another has been put into place
            if op.way is not Way.STRAIGHT and not self._in_loop:
                self._loop.call_soon_threadsafe(self._pump_in_turn)
                break
            several = self._per_call(op)
            if linger and self._room < min(several, len(self._queue)):
                self._linger()
                break
            self._queue.popleft()
            if op.index in op.group.failures:
                self._part_done(op)  # another range of it has failed
            elif self._enter(op):
                self._stop_lingering()
                companions = self._companions(several - 1)
                if companions:
                    self._send_bundle([op, *companions])
                else:
                    self._send(op)
        if self._in_flight and not self._ticking:
            self._ticking = True
            self._loop.call_soon_threadsafe(self._tick)

    def _cut(self, op: Op) -> None:
        """Ask for a range by pieces: it was to go straight into place, and has to be copied now."""
        step = self._range_bytes
        pieces = [
            Op(op.group, op.index, op.kind, op.offset + at, min(step, op.length - at))
            for at in range(0, op.length, step)
        ]
        for piece in pieces:
            piece.slow, piece.again, piece.first = op.slow, op.again, op.first
        op.group.parts_left[op.index] += len(pieces) - 1
        self._queue.extendleft(reversed(pieces))

    @_in_turn
    def _pump_in_turn(self) -> None:
        self._pump()

    @property
    def _in_loop(self) -> bool:
        """This is the loop's thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def _room(self) -> int:
        """How many more may be in flight now [requests]."""
        return self._window.limit - len(self._in_flight)

    def _linger(self) -> None:
        """Send later: a moment from now at most, and before that when there is more room."""
        if self._lingering is None:
            self._lingering = self._loop.call_later(_LINGER_SECONDS, self._lingered)

    def _stop_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    @_in_turn
    def _lingered(self) -> None:
        self._lingering = None
        self._pump(linger=False)

    def _enter(self, op: Op) -> bool:
        """Count a request as in flight, unless nobody wants it any more."""
        with self._lock:
            if op.group.discarded:
                return False
            op.group.running += 1
            op.began = time.perf_counter()
            op.first = op.first or op.began
            self._in_flight[op] = None
        self._beside += op.beside
        if op.kind.is_read:
            self._reading += 1
            self._peak = max(self._peak, self._reading)
        else:
            self._metadata_ops += 1
        return True

    def _choose(self, op: Op) -> None:
        """How to send it now: what it is for, by whom, and whether its bytes arrive beside."""
        if op.kind is Kind.PEEK and not self._may_peek():
            op.kind = Kind.HEAD
        if op.kind.is_read and op.length and self._straight is not None and not op.slow:
            op.way = Way.STRAIGHT
            op.beside = op.length if op.kind is Kind.PEEK else 0
            return
        copied = op.kind in (Kind.PEEK, Kind.RANGE) or self._may_be_copied(op)
        if copied and not op.slow and self._quick is not None and self._quick.spells(op.name):
            op.way = Way.QUICK
        elif op.kind is Kind.WHOLE and copied and not op.alone and self._client.can_bundle:
            op.way = Way.TOGETHER
        else:
            op.way = Way.ALONE
        is_placed = op.kind is Kind.WHOLE and op.way is Way.ALONE
        op.beside = op.length if copied and not is_placed else 0

    def _may_be_copied(self, op: Op) -> bool:
        """It is a whole object, small, and there is room for it beside the attached memory."""
        return (
            op.kind is Kind.WHOLE
            and 0 < op.length <= self._range_bytes
            and self._has_room_for(op.length, self._range_bytes)
        )

    def _per_call(self, op: Op) -> int:
        """How many objects to ask for in one call that begins with this."""
        return self._bundling.per_call(self._window.limit) if op.way is Way.TOGETHER else 1

    def _companions(self, wanted: int) -> list[Op]:
        """So many more objects for the same call, as far as there are; they are in flight."""
        found: list[Op] = []
        while len(found) < wanted and self._queue and self._room > 0:
            companion = self._queue[0]
            self._choose(companion)
            if companion.way is not Way.TOGETHER:
                break
            self._queue.popleft()
            if self._enter(companion):
                found.append(companion)
        return found

    def _send_bundle(self, ops: list[Op]) -> None:
        uris = [self._client.uri(op.name) for op in ops]
        future = self._promised(lambda: self._client.get_many(uris))
        for op in ops:
            op.future, op.bundled = future, True
        future.add_done_callback(functools.partial(self._bundle_ended, ops, uris))

    def _send(self, op: Op) -> None:
        if op.way is Way.STRAIGHT:
            self._send_straight(op)
            return
        op.future = self._promised(lambda: self._call(op))
        op.future.add_done_callback(functools.partial(self._ended, op))

    def _send_straight(self, op: Op) -> None:
        """Have a thread ask for it and wait."""
        client = self._straight
        assert client is not None
        target = None if op.kind is Kind.PEEK else self._target(op)
        ends = op.kind is Kind.WHOLE and op.group.listed[op.index] >= 0

        def work(call: Call) -> Any:
            if target is None:
                return client.peek(op.name, op.length, call)
            return client.get(op.name, op.offset, target, call, ends=ends)

        try:
            op.future = self._callers.call(work, functools.partial(self._came, op))
        except RuntimeError as error:  # there is no thread to be had
            self._only_s3dlio(error)
            self._send_otherwise(op, time.perf_counter())

    def _came(self, op: Op, call: Call) -> None:
        """A thread has ended its call. It goes on with this, unless another is at it already."""
        self._back.append((op, call))
        try:
            self._look_back()
        except Exception as error:  # the loop would say so, where it is the loop's thread
            with self._turn:
                self._defective(error)

    def _look_back(self) -> None:
        """See to what has come back while somebody else had the turn."""
        while self._back and self._turn.acquire(blocking=False):
            try:
                while self._back:
                    op, call = self._back.popleft()
                    if call.exception() is None or self._in_loop:
                        self._end_one(op, call)
                    else:
                        with contextlib.suppress(RuntimeError):  # the loop is closed
                            self._loop.call_soon_threadsafe(self._ended, op, call)
            finally:
                self._turn.release()

    def _promised(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """The future of a call; also of one that s3dlio refuses before there is a future."""
        try:
            promised: asyncio.Future[Any] = asyncio.ensure_future(call(), loop=self._loop)
            return promised
        except Exception as error:
            future = self._loop.create_future()
            future.set_exception(error)
            return future

    def _call(self, op: Op) -> Any:
        if op.way is Way.QUICK:
            assert self._quick is not None
            one_more = op.kind is Kind.WHOLE  # which shows whether it ends there
            return self._quick.get(op.name, op.offset, op.length + one_more)
        uri, client = self._client.uri(op.name), self._client
        if op.kind is Kind.WHOLE:
            return client.get_into(uri, self._target(op), op.length)
        if op.kind in (Kind.PEEK, Kind.RANGE):
            return client.get_range(uri, op.offset, op.length)
        if op.kind is Kind.ASK:
            return client.get_into(uri, memoryview(bytearray(1)), 1)
        return client.head(uri)

    def _target(self, op: Op) -> memoryview:
        """Where its bytes go."""
        place = op.group.places[op.index]
        if place == DROP:
            fits = self._spare and len(self._spare[-1]) >= op.length
            op.scratch = self._spare.pop() if fits else np.empty(max(op.length, PAGE), np.uint8)
            return op.scratch.data[: op.length]
        assert self._memory is not None
        begin = place + op.offset
        return self._memory[begin : begin + op.length]

    @_in_turn
    def _tick(self) -> None:
        """Give up requests that take too long, however little by little they advance."""
        self._ticking = False
        if not self._in_flight:
            return
        self._ticking = True
        self._loop.call_later(_TICK_SECONDS, self._tick)
        now = time.perf_counter()
        self._bundling.look(now, self._reads, bool(self._queue))
        for op in list(self._in_flight):
            age, longest = now - op.began, self._spec.request_timeout
            if age < min(_BUNDLE_SECONDS, longest):
                break
            allowed = min(_BUNDLE_SECONDS, longest) if op.bundled else longest
            if age >= allowed and op.future is not None and not op.late:
                op.late = True
                op.future.cancel()

    @_in_turn
    def _ended(self, op: Op, future: asyncio.Future[Any] | Call) -> None:
        self._end_one(op, future)

    def _end_one(self, op: Op, future: asyncio.Future[Any] | Call) -> None:
        now = time.perf_counter()
        result, failure = self._outcome(op, future)
        if failure is None and op.way is Way.STRAIGHT:
            result, failure = self._arrived(op, result)
        if op.way is not Way.ALONE and self._is_unclear(op, result, failure):
            if failure is not None:
                self._only_s3dlio(failure.error)
            self._answered = True
            self._send_otherwise(op, now)
            self._pump()
            return
        if failure is None and op.way is not Way.STRAIGHT and op.kind is Kind.RANGE:
            failure = self._store(op, result)
        elif failure is None and op.kind is Kind.WHOLE and op.way is Way.QUICK:
            failure, result = self._store(op, result), op.length
        self._conclude(op, result, failure, now)
        self._pump()

    def _arrived(self, op: Op, result: Any) -> tuple[Any, Failure | None]:
        """What an answer of rayloader's own client brought; it is in its place already."""
        if op.kind is Kind.PEEK:
            return result, None
        found: Found = result
        wrong = None
        has_grown = found.total > op.length and op.group.listed[op.index] >= 0
        if op.kind is Kind.WHOLE and (found.total < op.length or has_grown):
            wrong = self._other_size(op, found.total)
        elif found.length != op.length:
            wrong = self._wrong_range(op, found.length)
        return op.length, Failure(wrong, passes=False) if wrong is not None else None

    def _is_unclear(self, op: Op, view: Any, failure: Failure | None) -> bool:
        """What came leaves a question: how large the object is, or what it holds."""
        if failure is not None:
            return isinstance(failure.error, RangeIgnored)
        if op.way is not Way.QUICK:
            return False
        has_grown = op.kind is Kind.WHOLE and len(view) > op.length
        return has_grown and op.group.listed[op.index] >= 0

    def _only_s3dlio(self, why: Exception) -> None:
        """Others cannot be used here."""
        if self._straight is not None:
            _log.warning("from now on objects are read by s3dlio: %s", why)
            self._straight.close()
        self._quick = self._straight = None

    def _send_otherwise(self, op: Op, now: float) -> None:
        """Send it again, by s3dlio."""
        self._leave(op, now)
        op.slow, op.late = True, False
        self._retries += 1
        self._queue.appendleft(op)

    @_in_turn
    def _bundle_ended(self, ops: list[Op], uris: list[str], future: asyncio.Future[Any]) -> None:
        now = time.perf_counter()
        if future.cancelled() or future.exception() is not None:
            self._take_apart(ops, future, now)
        else:
            views = dict(future.result())
            for op, uri in zip(ops, uris, strict=True):
                self._conclude(op, op.length, self._store(op, views.get(uri)), now)
        self._pump()

    def _take_apart(self, ops: list[Op], future: asyncio.Future[Any], now: float) -> None:
        """One of several has failed, so all have: they are asked for again one by one."""
        self._bundling.failed(now)
        _, failure = self._outcome(ops[0], future)
        assert failure is not None
        _log.debug("%d objects of one call are asked for one by one: %s", len(ops), failure.error)
        if failure.passes and not ops[0].late:
            self._window.trouble(now)
            self._throttled += isinstance(failure.error, Throttled)
        for op in reversed(ops):
            self._leave(op, now)
            op.alone = True
            op.bundled = op.late = False
            self._retries += 1
            self._queue.appendleft(op)

    def _conclude(self, op: Op, result: Any, failure: Failure | None, now: float) -> None:
        """One request has ended."""
        self._leave(op, now)
        if op.scratch is not None:
            self._spare.append(op.scratch)
            op.scratch = None
        if failure is None or not isinstance(failure.error, Unreachable | TimedOut):
            self._answered = True
        if failure is None:
            self._window.success()
        if not op.group.discarded:
            if failure is None:
                _SUCCEEDED[op.kind](self, op, result)
            else:
                self._failed(op, failure, now)

    def _leave(self, op: Op, now: float) -> None:
        """Count a request as no longer in flight."""
        op.future = None
        self._beside -= op.beside
        if op.kind.is_read:
            self._reading -= 1
            self._reads += 1
            self._read_seconds += now - op.began
            self._latency[latency_bucket(now - op.began)] += 1
        with self._lock:
            del self._in_flight[op]
            self._stopped_running(op.group)

    def _stopped_running(self, group: Group) -> None:
        """One request less is in flight; with the lock held."""
        group.running -= 1
        if group.discarded and not group.running:
            self._leaving.discard(group)
            self._signal()

    def _outcome(self, op: Op, future: asyncio.Future[Any] | Call) -> tuple[Any, Failure | None]:
        """What a request brought, or why it failed."""
        if not future.cancelled() and future.exception() is None:
            return future.result(), None
        name = op.group.name(op.index)
        if future.cancelled():
            cause = f"the request did not end within request_timeout={self._spec.request_timeout:g}"
            return None, Failure(made(TimedOut, name, f"{cause} s", self._access), passes=True)
        error = future.exception()
        assert error is not None
        if isinstance(error, Unspoken):
            return None, Failure(made(RangeIgnored, name, str(error), self._access), passes=False)
        actual = getattr(error, "actual", None)
        if actual is None:
            if op.way in (Way.QUICK, Way.STRAIGHT):
                said = of_obstore if op.way is Way.QUICK else of_http
                failure = said(name, error, self._access)
                begins = op.kind is not Kind.WHOLE or failure.passes
                if isinstance(failure.error, Truncated) and not begins:
                    failure = Failure(self._other_size(op, 0), passes=False)
                return None, failure
            return None, of_s3dlio(name, self._client.uri(op.name), error, self._access)
        if op.kind is Kind.ASK or (actual > op.length and op.group.listed[op.index] < 0):
            return actual, None
        return None, Failure(self._other_size(op, actual), passes=False)

    def _other_size(self, op: Op, actual: int) -> StorageError:
        """The error for an object that has another size than it should."""
        group, expected = op.group, op.group.sizes[op.index]
        kind = Replaced if actual > expected else Truncated
        since = "listed" if group.listed[op.index] >= 0 else "measured"
        words = f"it has {actual:,} bytes, and had {expected:,} when it was {since}"
        return made(kind, group.name(op.index), words, self._access)

    def _store(self, op: Op, view: Any) -> Failure | None:
        """Put bytes that have arrived into their place."""
        data = np.frombuffer(view, np.uint8) if view is not None else self._bytes[:0]
        if op.kind is Kind.WHOLE and op.group.listed[op.index] < 0:
            data = data[: op.length]  # it may have grown since it was measured
        if len(data) != op.length:
            whole = op.kind is Kind.WHOLE
            error = self._other_size(op, len(data)) if whole else self._wrong_range(op, len(data))
            return Failure(error, passes=False)
        place = op.group.places[op.index]
        self._put(data, place if place == DROP else place + op.offset)
        return None

    def _put(self, data: npt.NDArray[np.uint8], place: int) -> None:
        if place != DROP:
            self._bytes[place : place + len(data)] = data

    def _wrong_range(self, op: Op, length: int) -> StorageError:
        name = op.group.name(op.index)
        if length < op.length:
            return made(Truncated, name, "it ended before its size", self._access)
        return made(
            RangeIgnored,
            name,
            f"the server sent {length:,} bytes where a range of {op.length:,} was asked for: "
            "set part_bytes to more than the objects' size",
            self._access,
        )

    # What a request that went well leads to

    def _measured(self, op: Op, found: Any) -> None:
        group, i = op.group, op.index
        if found is None:
            self._ask(op, made(ObjectNotFound, group.name(i), "no such object", self._access))
            return
        group.sizes[i] = found.size
        self._may_be_small = found.size < self._peek_bytes
        if found.size > self._spec.part_bytes:
            group.versions[i] = Version(found.etag, found.size)
        self._object_done(group)

    def _peeked(self, op: Op, view: Any) -> None:
        """What came is all of the object, or it has to be asked for its size."""
        group, i = op.group, op.index
        data = np.frombuffer(view, np.uint8) if view is not None else None
        self._bytes_transferred += len(data) if data is not None else 0
        if data is None or len(data) >= op.length:
            self._may_be_small = False
            self._measure_by_head(op)
            return
        group.sizes[i] = len(data)
        group.peeked[i] = data
        self._beside += len(data)
        self._object_done(group)

    def _measure_by_head(self, op: Op) -> None:
        self._queue.appendleft(Op(op.group, op.index, Kind.HEAD))

    def _ask(self, op: Op, why: StorageError) -> None:
        """A HEAD failed, whose answer has no body that could say why; a GET's has."""
        asking = Op(op.group, op.index, Kind.ASK)
        asking.why = why
        self._queue.appendleft(asking)

    def _asked(self, op: Op, _: Any) -> None:
        """The GET went well, so the HEAD's own words must do."""
        assert op.why is not None
        self._fail(op, op.why)

    def _read_whole(self, op: Op, length: int) -> None:
        group, i = op.group, op.index
        if length > op.length:  # it has grown since it was measured: its first bytes are wanted
            group.parts_left[i] = 1
            self._queue.appendleft(Op(group, i, Kind.RANGE, 0, op.length))
            return
        self._bytes_transferred += op.length
        self._object_done(group)

    def _pinned(self, op: Op, found: Any) -> None:
        group, i = op.group, op.index
        if found is None:
            self._ask(op, made(ObjectNotFound, group.name(i), "no such object", self._access))
        elif found.size < group.sizes[i] or (found.size > group.sizes[i] and group.listed[i] >= 0):
            self._fail(op, self._other_size(op, found.size))
        else:
            group.versions[i] = Version(found.etag, found.size)
            self._queue.extendleft(reversed(list(self._ranges(group, i))))

    def _read_part(self, op: Op, _: Any) -> None:
        self._bytes_transferred += op.length
        self._part_done(op)

    def _part_done(self, op: Op) -> None:
        group, i = op.group, op.index
        group.parts_left[i] -= 1
        if group.parts_left[i]:
            return
        if i in group.versions and i not in group.failures:
            self._queue.appendleft(Op(group, i, Kind.CHECK))
        else:
            self._object_done(group)

    def _checked(self, op: Op, found: Any) -> None:
        """The version must be the one that the ranges began with; else they are read once more."""
        group, i = op.group, op.index
        if found is None:
            self._ask(op, made(ObjectNotFound, group.name(i), "no such object", self._access))
        elif Version(found.etag, found.size) == group.versions[i]:
            self._object_done(group)
        elif found.size < group.sizes[i]:
            self._fail(op, self._other_size(op, found.size))
        elif i in group.read_again or group.listed[i] >= 0:
            words = "it was replaced by another version while it was read"
            self._fail(op, made(Replaced, group.name(i), words, self._access))
        else:
            group.read_again.add(i)
            group.versions[i] = Version(found.etag, found.size)
            self._queue.extendleft(reversed(list(self._ranges(group, i))))

    # What one that failed leads to

    def _failed(self, op: Op, failure: Failure, now: float) -> None:
        error, passes = failure
        if passes:
            self._window.trouble(now)
            self._throttled += isinstance(error, Throttled)
            pause = min(_FIRST_PAUSE * 2**op.again, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            if now - op.first + pause < self._patience:
                self._pause(op, error, pause)
                return
            if op.again:
                error.add_note(f"asked {op.again + 1} times in {now - op.first:.1f} s")
        elif op.kind is Kind.PEEK and isinstance(error, Truncated):
            self._measure_by_head(op)  # of an empty object no range can be asked for
            return
        elif not (op.kind.is_read or op.kind is Kind.ASK):
            self._ask(op, error)
            return
        self._fail(op, error)

    @property
    def _patience(self) -> float:
        """How long one object may be asked for [s]."""
        longest = self._spec.retry_seconds
        return longest if self._answered else min(longest, FIRST_ANSWER_SECONDS)

    def _pause(self, op: Op, error: StorageError, seconds: float) -> None:
        """Send a request again, later."""
        _log.debug("sent again in %.2f s: %s", seconds, error)
        op.again += 1
        op.late = False
        self._retries += 1
        with self._lock:
            self._pausing[op] = None
        self._loop.call_later(seconds, self._send_again, op)

    @_in_turn
    def _send_again(self, op: Op) -> None:
        with self._lock:
            del self._pausing[op]
        self._queue.appendleft(op)
        self._pump()

    def _fail(self, op: Op, error: StorageError) -> None:
        op.group.failures.setdefault(op.index, error)
        if op.kind is Kind.RANGE:
            self._part_done(op)
        else:
            self._object_done(op.group)

    def _object_done(self, group: Group) -> None:
        group.unfinished -= 1
        if not group.unfinished:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        measured = group.stage is Stage.MEASURING
        with self._lock:
            if group.discarded:
                return
            group.stage = Stage.MEASURED if measured else Stage.FETCHED
            self._done[group.number] = group
            self._signal()

    def _signal(self) -> None:
        if not self._closed:
            os.eventfd_write(self._event, 1)

    def _defective(self, error: BaseException) -> None:
        """Something that should not happen has: the owner is told, rather than left waiting."""
        self._defect = error
        self._signal()


_SUCCEEDED: dict[Kind, Callable[[ObjectStorage, Op, Any], None]] = {
    Kind.HEAD: ObjectStorage._measured,
    Kind.PEEK: ObjectStorage._peeked,
    Kind.ASK: ObjectStorage._asked,
    Kind.WHOLE: ObjectStorage._read_whole,
    Kind.PIN: ObjectStorage._pinned,
    Kind.RANGE: ObjectStorage._read_part,
    Kind.CHECK: ObjectStorage._checked,
}


def _not_a_name(uri: bytes) -> str:
    """Why no object can be asked for by this URI; empty when it can."""
    try:
        uri.decode()
    except UnicodeDecodeError:
        return "no object's name is other than UTF-8"
    if not _DOTS.isdisjoint(uri.split(b"/")):
        # On their way they would be folded, as in paths, and another object be asked for.
        return "'.' and '..' between slashes cannot be asked for"
    return ""


_DOTS = frozenset((b".", b".."))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """The thread: run the loop until it is stopped."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _shut_down(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    callers: Callers,
    straight: HttpClient | None,
    in_flight: dict[Op, None],
    pid: int,
) -> None:
    """Give up what is in flight and end the threads; one that hangs is left behind."""
    if pid != os.getpid() or not thread.is_alive():
        return
    deadline = time.monotonic() + REQUESTS_END_SECONDS

    def stop_when_idle() -> None:
        if in_flight and time.monotonic() < deadline:
            loop.call_later(0.001, stop_when_idle)
        else:
            loop.stop()

    def give_up() -> None:
        for op in list(in_flight):
            if (future := op.future) is not None:  # another thread may end it meanwhile
                future.cancel()
        stop_when_idle()

    loop.call_soon_threadsafe(give_up)
    if thread is not threading.current_thread():  # which may be what drops the storage
        thread.join(2 * REQUESTS_END_SECONDS)
    callers.close(REQUESTS_END_SECONDS)
    if straight is not None:
        straight.close()


def _remember_defect(
    storage: weakref.ref[ObjectStorage],
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler for the loop that tells the storage."""

    def remember(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        owner = storage()
        if owner is not None:
            error = context.get("exception")
            owner._defective(error or RuntimeError(str(context.get("message"))))

    return remember
