"""The options of a reader with their defaults, and the bounds that are no options; each has a unit.

Bounds are here where somebody may meet them: time that is waited, memory and descriptors that are
taken, requests and attempts at once. What only tunes a mechanism (a length of a loop's step, the
size of a block, a threshold of a judgement) stands beside it, with its unit too.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

from rayloader.errors import OptionError

MIB = 1 << 20
PAGE = 4096
"""Extents are rounded to this [bytes]: the page, and what O_DIRECT wants."""


# Bounds that are no options
LISTING_SECONDS = 24 * 3600.0
"""How long ranks wait for the one that lists for them [s]; its death ends their wait."""
ROOM_SECONDS = 10.0
"""How long a trainer that holds the whole arena may go on holding it while it waits [s]."""
SHORT_EPOCH_SECONDS = 0.5
"""Shorter epochs of a sweep show how they begin and end, not how fast they read [s]."""
POPULATED_BYTES = 128 * MIB
"""The arena's first pages, touched before the clock [bytes]."""
RANGES_BYTES = 64 * MIB
"""Ranges of large objects on their way to the arena, at most; taken from ``memory_bytes``, of which
they get an eighth if that is less [bytes]."""
LISTINGS_AT_ONCE = 16
"""Requests in flight while a bucket is listed [requests]."""
LOOK_AHEAD_BYTES = 32 * MIB
"""So much is being read at least, and no more while reads return at once [bytes]."""
SIZES_REMEMBERED = 4_000_000
"""A reader remembers the sizes of a catalog's entries when there are no more [entries]."""
TABLES_BYTES = 4 * MIB
"""Least arena of a reader that drops the bytes: room for batches' tables only [bytes]."""
DESCRIPTOR_SECONDS = 5.0
"""How long an open waits for a free descriptor before "too many open files" is an error [s]; the C
engine has the same."""
METRICS_SECONDS = 5.0
"""Time between two reports of a reader to Ray's metrics, which Ray exports every 10 s [s]."""
CLOSE_SECONDS = 1.0
"""A reader whose trainer has gone ends by itself after this [s]. A closing trainer has Ray end it,
which Ray then does not report as a crash."""
KILL_SECONDS = 5.0
"""A killed reader has ended within this [s], or a read that hangs in the kernel keeps it."""
PATIENCE_SECONDS = 1.0
"""A call of Ray's that takes longer has its address probed, again and again [s]."""
PROBE_SECONDS = 3.0
"""A Ray's address must take a connection and speak HTTP/2 within this [s]."""
LEAVE_SECONDS = 5.0
"""Ray's own shutdown may take this long; then it is left to the guardian [s]."""
FIRST_OWNER_SECONDS = 8.0
"""A guardian that nobody joins within this ends [s]: its starter was interrupted or killed."""
END_SECONDS = 8.0
"""What a guardian has killed must be gone within this; then it is left, stuck in the kernel [s]."""
GUARDIAN_MESSAGE_BYTES = 128 << 10
"""Bound on one message between rank and guardian; a SEQPACKET message must fit in the send
buffer [bytes]."""
DIRECTORY_BYTES = 78
"""Longest private directory: Ray's socket names in it must stay below 108 [bytes]."""
DIRECTORY_FREE_BYTES = 16 * MIB
"""Free space that Ray's files need at the least [bytes]."""
OBJECT_STORE_BYTES = 80 * MIB
"""Object store of a private Ray, just above Ray's least; batches do not go through it [bytes]."""
RAY_ADDRESS_SPACE = 2304 * MIB
"""Ray 2.60 maps so much, at the least, into a process that joins it; with less it hangs [bytes]."""
LEAST_PROCESSES, USUAL_PROCESSES = 80, 500
"""Of a guardian, its private Ray and a reader: on two CPUs, and on many [processes and threads]."""
READER_BYTES = 96 * MIB
"""What a reader's process takes for itself, with some room [bytes]."""
DESCRIPTORS_KEPT = 64
"""Left to the rest of a reader's process by its reads [files]."""
READS_END_SECONDS = 0.2
"""Closing a reader waits so long for reads of files in flight [s]."""
REQUESTS_END_SECONDS = 0.5
"""The same for requests of objects, which are given up [s]."""
FIRST_ANSWER_SECONDS = 5.0
"""An object storage that has never answered is asked no longer than this: it is the wrong address
[s]."""
STATS_AT_ONCE = 64
"""Files that are looked up at once when a catalog is to have their sizes [files]."""
BUCKET_CONNECT_SECONDS, BUCKET_ANSWER_SECONDS = 10.0, 60.0
"""Of requests that list a bucket or fill it: until a connection stands, and between two pieces of
an answer [s]."""
BUCKET_ATTEMPTS = 5
"""How often such a request is sent [requests]."""
RANK_LEAVE_SECONDS = 30.0
"""A rank of ``rayloader read`` that has closed its pipe must have ended within this [s]."""
RANK_END_SECONDS = 10.0
"""Ranks told to end, those of a Fleet too, have this long before they are killed [s]."""
RUN_GONE_SECONDS = 15.0
"""Everything that a run has started must have ended this long after its ranks [s]."""
RANK_ANSWER_SECONDS = 30.0
"""A Fleet's consumer must answer within this [s]; it reads in another thread."""
ALONE_READS, ALONE_SECONDS = 8, 30.0
"""Reads that show how long one takes alone, of files spread over the catalog [reads], and how long
they may take [s]."""
DROP_SECONDS = 600.0
"""Dropping all files from a node's page cache may take so long [s]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How one rank reads. Frozen; a changed copy comes from :meth:`replace`.

    Raises:
        OptionError: for a value out of range or a combination that cannot work.
    """

    # What and in which order
    batch_size: int = 1
    """Samples per batch and rank [samples], > 0."""
    shuffle: bool = True
    """Permute the catalog anew each epoch. An explicit list is never shuffled."""
    seed: int = 0
    """Seed of the permutation; the same on every rank."""
    uneven: Literal["drop", "pad"] = "drop"
    """What happens to the samples that do not divide by the ranks: at most W-1 are dropped,
    or the epoch's first ones are read twice."""
    drop_last: bool = False
    """Leave out the short last batch."""
    ordered: bool = True
    """Deliver in the plan's order; ``False`` delivers batches as they complete."""

    # How much at once
    concurrency: int = 64
    """Ceiling on reads in flight for this rank [reads], > 0."""
    memory_bytes: int = 512 * MIB
    """Bound on batches in memory: arena and part buffers together [bytes]."""
    part_bytes: int = 8 * MIB
    """A larger file is read as parallel ranges of this length [bytes]; a multiple of 4096."""
    read_ahead_batches: int | None = None
    """Batches read before the trainer asked for them [batches]; ``None``: as memory allows; 0:
    none (needs the local channel)."""

    # From where to where
    deliver: bool = True
    """``False`` reads and drops the bytes in the reader: a storage test without a consumer."""
    direct: bool | Literal["fallback"] = False
    """O_DIRECT. ``True``: a file system that refuses is an error; ``"fallback"``: it is read
    through the page cache and counted on the receipt."""
    drop_cache: bool = False
    """Drop each file from the page cache before reading it (cold reads without root)."""
    engine: Literal["auto", "native", "python"] = "auto"
    """The POSIX engine: the C extension, or the same in Python."""
    channel: Literal["auto", "local", "ray"] = "auto"
    """How batches reach the trainer: shared memory, or Ray's object store."""
    ray: str = "auto"
    """Which Ray: ``auto`` (one this process has joined, else ``RAY_ADDRESS``, else a private
    one), ``private``, ``cluster`` (the one running here), or an address ``host:port``."""
    cpus: Literal["rank", "node"] = "rank"
    """The CPUs of the reader: those its rank may use, or all of the node."""

    # Object storage
    endpoint_url: str | None = None
    """Where S3 requests go: ``http://host:port``. ``None``: as AWS_ENDPOINT_URL says, else to
    Amazon. Credentials are no option: they come from the environment."""
    region: str | None = None
    """The region that S3 requests are signed for; ``None``: as AWS_REGION says."""
    ca_bundle: str | None = None
    """File of the certificate authorities that endpoints are checked against, on the reader's
    node; ``None``: as AWS_CA_BUNDLE says, else the system's."""
    client: Literal["auto", "http", "obstore", "s3dlio"] = "auto"
    """What reads S3 objects and ranges; everything else is s3dlio's. ``auto``: from an endpoint of
    ``http://`` rayloader's own client, which takes the least CPU time, else obstore where it is
    installed, for small ones."""
    request_timeout: float = 60.0
    """An object request that has not ended by then, also one that trickles, is sent again [s]."""
    retry_seconds: float = 120.0
    """How long one object is asked for again while the storage throttles, fails or is away [s]."""

    # When things fail
    verify: bool = False
    """Compare every sample with its checksum in the catalog: CRC-32 of generated data, MD5 where
    a bucket's ETag is one. Another is ``Replaced``. Costs the reader time."""
    on_error: Literal["raise", "skip"] = "raise"
    """What an unreadable sample does: ends the epoch with its error, or is left out and listed."""
    skip_budget_files: int = 1000
    """With ``on_error="skip"``: samples per epoch and rank that may fail [samples]."""
    skip_budget_share: float = 0.01
    """With ``on_error="skip"``: share of the rank's samples in the epoch that may fail [0..1].
    One sample may always fail."""
    max_restarts: int = 3
    """Consecutive restarts of the reader without a delivered batch [restarts]."""
    start_timeout: float = 60.0
    """Ray and the reader must be up within this [s]."""
    stall_seconds: float = 30.0
    """No batch for this long: one warning [s]."""
    read_timeout: float = 300.0
    """No progress of any read for this long: ``StorageStalled`` [s]."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _require(getattr(self, name) in allowed, name, getattr(self, name), _list(allowed))
        for name in ("batch_size", "concurrency", "memory_bytes", "part_bytes"):
            _whole(self, name, least=1)
        for name in ("max_restarts", "skip_budget_files"):
            _whole(self, name, least=0)
        _whole(self, "seed", least=None)
        if self.read_ahead_batches is not None:
            _whole(self, "read_ahead_batches", least=0)
            needs_local = self.read_ahead_batches == 0 and self.channel == "ray"
            _require(
                not needs_local, "read_ahead_batches", 0, "at least 1 batch with channel='ray'"
            )
        for name in _SECONDS:
            _require(_number(getattr(self, name)) > 0, name, getattr(self, name), "seconds > 0")
        timeout = self.start_timeout
        _require(timeout <= 1e6, "start_timeout", timeout, "at most 1e6 seconds")
        share = self.skip_budget_share
        _require(0 <= _number(share) <= 1, "skip_budget_share", share, "a share from 0 to 1")
        _require(self.deliver or not self.verify, "verify", True, "False with deliver=False")
        for name in ("shuffle", "drop_last", "ordered", "deliver", "drop_cache", "verify"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "a bool")
        _require(isinstance(self.ray, str), "ray", self.ray, "a string")
        for name in ("endpoint_url", "region", "ca_bundle"):
            text = getattr(self, name)
            given = isinstance(text, str) and text != ""
            _require(text is None or given, name, text, "a string that is not empty")
        if self.endpoint_url is not None:
            _require_endpoint(self.endpoint_url)
        _require(self.concurrency <= 4096, "concurrency", self.concurrency, "at most 4096 reads")
        _require(
            self.part_bytes % PAGE == 0, "part_bytes", self.part_bytes, f"a multiple of {PAGE}"
        )
        _require(
            self.memory_bytes >= 16 * PAGE,
            "memory_bytes",
            self.memory_bytes,
            f"at least {16 * PAGE} bytes",
        )

    @property
    def ranges_bytes(self) -> int:
        """Of ``memory_bytes``, what ranges of large objects get on their way to the arena."""
        return min(RANGES_BYTES, self.memory_bytes // 8)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Options from a mapping of names to values.

        Raises:
            OptionError: for an unknown name (the nearest known one is suggested) or a bad value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise OptionError(f"unknown option {name!r}{hint}")
        return cls(**values)

    def replace(self, **changes: Any) -> Options:
        """A copy with some values changed, checked like a new one."""
        return type(self).of({**self.asdict(), **changes})

    def asdict(self) -> dict[str, Any]:
        """Every option by name."""
        return dataclasses.asdict(self)


def _choices() -> dict[str, tuple[Any, ...]]:
    """The options that take one of a few words, and these words."""
    found = {}
    for name, hint in get_type_hints(Options).items():
        words = [word for part in (hint, *get_args(hint)) for word in get_args(part)]
        literals = tuple(word for word in words if isinstance(word, str))
        if literals:
            found[name] = (True, False, *literals) if name == "direct" else literals
    return found


_CHOICES = _choices()
_SECONDS = ("start_timeout", "stall_seconds", "read_timeout", "request_timeout", "retry_seconds")


def _require_endpoint(url: str) -> None:
    """Raise unless a URL is ``http(s)://host[:port][/path]``.

    What else it holds is not repeated: it may be a password.
    """
    try:
        parts = urlsplit(url)
        bare = not (parts.query or parts.fragment or "@" in parts.netloc or parts.port == 0)
    except ValueError:
        bare = False
    if not (bare and parts.scheme in ("http", "https") and parts.hostname):
        raise OptionError("endpoint_url: must be http://HOST:PORT or https://HOST[:PORT]")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name}={value!r}: must be {wanted}")


def _list(words: tuple[Any, ...]) -> str:
    return "one of " + ", ".join(repr(word) for word in words)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0


def _whole(options: Options, name: str, least: int | None) -> None:
    value = getattr(options, name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    wanted = "a whole number" if least is None else f"a whole number >= {least}"
    _require(whole and (least is None or value >= least), name, value, wanted)
