"""The packets of the local channel.

An abstract Unix SEQPACKET socket. The reader listens, the trainer connects and passes the arena,
so that what the trainer holds outlives a reader::

    trainer → reader   HELLO (arena and catalog as descriptors; access to objects) · HELD* · BEGIN
                       RELEASED a batch · TAKEN batches (if read-ahead is bounded) · CONCURRENCY
    reader → trainer   WELCOME · SKIPPED* · READY · BLOCKED · WARNED · FAILED · ENDED · CRASHED

BEGIN says that everything the trainer said before belongs to an older epoch, and how many batches
of that epoch the trainer took: what else was sent, it will never look at. A share of the catalog is
a few numbers and travels with BEGIN; a list of files travels as an actor method call that bears the
same generation. Both ends trust only the same user
(SO_PEERCRED), and both notice the other's death by the socket's end *and* by a pidfd: a process
forked by the trainer keeps the socket open.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import pickle
import struct

from rayloader.errors import ChannelError, OptionError, RayloaderError
from rayloader.plan import EpochPlan, Shard
from rayloader.reader import Blocked, Ended, Failed, Outcome, Ready, Request, Warned
from rayloader.receipt import Skipped

PROTOCOL_VERSION = 3
PACKET_BYTES = 1 << 17
PAYLOAD_BYTES = PACKET_BYTES - 1024
FIELDS = struct.Struct("<B7x6q2Q")
"""The kind, and eight whole numbers: six with a sign, and two for what fills 64 bits."""
_NOTHING = (0,) * 8


class Kind(enum.IntEnum):
    """What a packet says."""

    HELLO = 1
    HELD = 2
    BEGIN = 3
    TAKEN = 4
    RELEASED = 5
    CONCURRENCY = 6
    WELCOME = 16
    READY = 17
    BLOCKED = 18
    WARNED = 19
    FAILED = 20
    ENDED = 21
    CRASHED = 22
    SKIPPED = 23


_KINDS = {int(kind): kind for kind in Kind}


def pack(kind: Kind, *fields: int, payload: bytes = b"") -> bytes:
    """A packet: up to eight whole numbers of 64 bits, and bytes behind them."""
    return FIELDS.pack(kind, *fields, *_NOTHING[len(fields) :]) + payload


def unpack(packet: memoryview | bytes) -> tuple[Kind, tuple[int, ...], bytes]:
    """The kind, the eight numbers and the bytes of a packet.

    Raises:
        ChannelError: it is no packet of ours.
    """
    if len(packet) < FIELDS.size:
        raise ChannelError(f"a packet of {len(packet)} bytes is too short")
    number, *fields = FIELDS.unpack_from(packet)
    kind = _KINDS.get(number)
    if kind is None:
        raise ChannelError(f"unknown kind of packet: {number}")
    return kind, tuple(fields), bytes(packet[FIELDS.size :])


def pack_request(request: Request) -> bytes:
    """A request for a share of the catalog as BEGIN's payload.

    Empty where it must travel otherwise: it is about a list of files, or it is too long (after
    ``ordered=False`` it may name many batches that are there already).
    """
    if not isinstance(request.plan, EpochPlan):
        return b""
    words = dataclasses.asdict(request) | {"delivered": sorted(request.delivered)}
    payload = json.dumps(words).encode()
    return payload if len(payload) <= PAYLOAD_BYTES else b""


def unpack_request(payload: bytes) -> Request:
    """What :func:`pack_request` has packed.

    Raises:
        ChannelError: it is no request.
    """
    try:
        words = json.loads(payload)
        plan = dict(words.pop("plan"))
        return Request(
            **words | {"delivered": frozenset(words["delivered"])},
            plan=EpochPlan(**plan | {"shard": Shard(**plan["shard"])}),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OptionError) as wrong:
        raise ChannelError(f"a request makes no sense: {wrong!r}") from wrong


def pack_outcome(generation: int, outcome: Outcome) -> list[bytes]:
    """What a reader has for its trainer, as packets."""
    match outcome:
        case Ready(step, table_at, length, samples, nbytes, names, skipped):
            ready = pack(
                Kind.READY,
                generation,
                step,
                table_at,
                length,
                samples,
                nbytes,
                names.content,
                names.order,
            )
            return [*(pack(Kind.SKIPPED, generation, payload=_json(one)) for one in skipped), ready]
        case Failed(step, error):
            return [pack(Kind.FAILED, generation, step, payload=pickled(error))]
        case Blocked(step, needed):
            return [pack(Kind.BLOCKED, generation, step, needed)]
        case Warned(text):
            return [pack(Kind.WARNED, generation, payload=text.encode(errors="replace"))]
        case Ended(steps):
            return [pack(Kind.ENDED, generation, steps)]


def _json(skipped: Skipped) -> bytes:
    return json.dumps(skipped).encode()


def pickled(error: RayloaderError) -> bytes:
    """An error as bytes; one too large for a packet loses its cause, or all but its first words."""
    for _ in ("with its cause", "without"):
        payload = pickle.dumps(error)
        if len(payload) <= PAYLOAD_BYTES:
            return payload
        error = copy.copy(error)
        error.__cause__ = None
    return pickle.dumps(ChannelError(f"{type(error).__name__}: {str(error)[:1000]}"))


def unpickled(payload: bytes) -> RayloaderError:
    """The reader's error. The peer is this user's own process, so unpickling gives nobody more."""
    try:
        error = pickle.loads(payload)
    except Exception as unknown:  # unpickling can raise anything
        return ChannelError(f"the reader failed with an error that cannot be read: {unknown!r}")
    if not isinstance(error, RayloaderError):
        return ChannelError(f"the reader failed with {error!r}")
    return error
