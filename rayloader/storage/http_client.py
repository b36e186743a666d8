"""GETs of S3 objects over plain HTTP: from a socket straight to their place.

One thread waits for one answer, whose bytes the kernel puts where they belong. That takes less than
half of the CPU time of a client that hands bytes over in memory of its own. It is for endpoints of
``http://``, as storages within a cluster have, and speaks as much of HTTP as they do when all goes
well. What it is answered otherwise is left to a client that speaks all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import random
import re
import socket
import time
import urllib.request
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from rayloader.storage.access import AWS_KEYS, Access
from rayloader.storage.callers import Call

try:
    from rayloader.storage._exchange import exchange as native
except ImportError:  # it was not built
    native = None  # type: ignore[assignment]

_CONNECT_SECONDS = 10.0
_HEAD_BYTES = 16 << 10
"""An answer's head has to fit; what came with it of the body is copied [bytes]."""
_WORDS_BYTES = 64 << 10
"""Of the body of an answer that is an error [bytes]."""
_WORDS_SECONDS = 2.0
"""More of them is waited for: some errors end without saying where [s]."""
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})")
_HOPED = re.compile(
    rb"HTTP/1\.[01] 20[06](?i:(?!.*\r\ntransfer-encoding:)"
    rb"(?>.*?\r\ncontent-length:) *(\d{1,18}) *\r\n)",  # the first such field decides
    re.S,
)
_PLAIN = re.compile(r"[\x21-\x7e]+")
_NUMBER = re.compile(rb"\d{1,18}")
_WORDS_END = re.compile(rb"</Error>|(?:\A|\r\n)0\r\n")
_CODE = re.compile(rb"<Code>(\w+)</Code>")
_EMPTY = hashlib.sha256(b"").hexdigest()


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, code: str) -> None:
        """HTTP's status, and S3's code where there is one."""
        super().__init__(status, code)
        self.status = status
        self.code = code


class Incomplete(Exception):
    """The connection ended before the answer did."""


class Unspoken(Exception):
    """The answer is one that this client does not understand."""


class _Stale(Exception):
    """The server had closed the connection before it was used again."""


class Found(NamedTuple):
    """What an answer is going to bring."""

    length: int
    """Of its body [bytes]."""
    total: int
    """Of the whole object [bytes]."""


class HttpClient:
    """GETs of parts of S3 objects; each blocks, so many threads use it at once."""

    def __init__(self, access: Access) -> None:
        """Ask the endpoint of ``access``, in its name; connections are made when needed."""
        server = urlsplit(access.endpoint)
        self._address = (server.hostname or "", server.port or 80)
        self._signer = Signer(access, server.netloc)
        self._idle: list[_Connection] = []
        self._closed = False

    def get(
        self, uri: str, offset: int, target: memoryview, call: Call, *, ends: bool = False
    ) -> Found:
        """GET as many bytes of an object as ``target`` has.

        Returns:
            What was found; where its ``length`` is another, there is nothing in ``target``.

        Args:
            uri: ``s3://bucket/key``.
            offset: of the first byte [bytes].
            target: where they go, at least 1.
            call: in whose thread this runs.
            ends: only if the object ends there.

        Raises:
            Refused: the server says why not.
            Unspoken: it answers in another way than servers do when all goes well.
            Incomplete: the connection ended too soon.
            OSError: it could not be made, or broke.
            Cancelled: the call was.
        """
        # One byte more is asked for: of an object that has it, the answer has another length.
        found, _ = self._asked(uri, offset, len(target) + ends, target, call)
        return found

    def peek(self, uri: str, length: int, call: Call) -> bytearray | None:
        """All bytes of an object that has fewer than ``length``; ``None``: it has more.

        Raises:
            Exception: as :meth:`get`.
        """
        _, body = self._asked(uri, 0, length, None, call)
        return body

    def close(self) -> None:
        """Close the connections that nobody uses; and others once they have been used."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _asked(
        self, uri: str, offset: int, length: int, target: memoryview | None, call: Call
    ) -> tuple[Found, bytearray | None]:
        path = f"/{quote(uri[len('s3://') :], safe='/-_.~')}"
        ask = _Ask(self._signer.get(path, offset, length), offset, length, target)
        with contextlib.suppress(IndexError, _Stale):  # there is none, or none any more
            return self._on(self._idle.pop(), ask, call)
        return self._on(_Connection(_connected(self._address, call)), ask, call)

    def _on(self, connection: _Connection, ask: _Ask, call: Call) -> tuple[Found, bytearray | None]:
        """Ask on this connection, and keep it if another request may follow."""
        body, may_follow = None, False
        try:
            call.waits_for(connection.socket)
            answer, read = connection.ask(ask.request, ask.target)
            if answer.status not in (200, 206):
                raise connection.refusal(answer)
            found = answer.found(ask.offset, ask.length)
            if ask.target is None and found.length < ask.length:
                body = connection.read(found.length)
                read = len(body)
            elif ask.target is not None and read < 0 and found.length == len(ask.target):
                raise Unspoken("a length in other words than servers use")
            if 0 <= read < found.length:
                raise Incomplete
            may_follow = read == found.length and answer.lasts and not connection.has_more(read)
        finally:
            call.waits_for(None)
            if may_follow:
                connection.was_used = True
                self._idle.append(connection)
                if self._closed:
                    self.close()
            else:
                connection.close()
        return found, body


class _Ask(NamedTuple):
    request: bytes
    offset: int
    length: int
    target: memoryview | None


class _Answer(NamedTuple):
    version: bytes
    """What follows ``HTTP/1.``"""
    status: int
    head: bytes
    """Its fields, in lower case."""

    @property
    def lasts(self) -> bool:
        """The connection may be used again."""
        return self.version == b"1" and b"close" not in self.field(b"connection")

    def field(self, name: bytes) -> bytes:
        """What a field says; empty where there is none."""
        at = self.head.find(b"\r\n" + name + b":")
        if at < 0:
            return b""
        begin = at + len(name) + 3
        end = self.head.find(b"\r\n", begin)
        return self.head[begin : end if end >= 0 else None].strip()

    @property
    def length(self) -> int:
        """Of the body [bytes].

        Raises:
            Unspoken: it does not say.
        """
        length = self.field(b"content-length")
        if not _NUMBER.fullmatch(length) or self.field(b"transfer-encoding"):
            raise Unspoken("an answer without a length")
        return int(length)

    def found(self, offset: int, asked: int) -> Found:
        """What it brings, from ``offset`` on; ``asked``, but less where the object ends."""
        length = self.length
        if self.status == 200:
            if offset:
                raise Unspoken("the whole object, where a range was asked for")
            return Found(length, length)
        span, _, total = self.field(b"content-range").partition(b"/")
        is_it = span == b"bytes %d-%d" % (offset, offset + length - 1) and _NUMBER.fullmatch(total)
        if not is_it or length != min(asked, int(total) - offset):
            raise Unspoken("another range than was asked for")
        return Found(length, int(total))


class _Connection:
    """A connection on which one request after the other is answered."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.was_used = False
        self._buffer = bytearray(_HEAD_BYTES)
        self._view = memoryview(self._buffer)
        self._came = self._body = 0
        """Of the last answer in the buffer: how much, and where its body begins [bytes]."""

    def ask(self, request: bytes, target: memoryview | None) -> tuple[_Answer, int]:
        """Send a request and wait for its answer.

        Returns:
            Its head; and how much of its body is in ``target``, -1: it has to be read [bytes].
        """
        self._buffer[0] = 0  # shows whether anything came
        try:
            self._came, read = _exchange(self.socket, request, self._buffer, target)
        except ConnectionError as broken:
            if self.was_used and not self._buffer[0]:
                raise _Stale from broken
            raise
        if self.was_used and not self._came:
            raise _Stale
        end = self._buffer.find(b"\r\n\r\n", 0, self._came)
        if end < 0:
            if self._came == len(self._buffer):
                raise Unspoken("a head that does not end")
            raise Incomplete
        head = bytes(self._buffer[:end])
        self._body = end + 4
        version = _STATUS.match(head)
        if version is None:
            raise Unspoken("no answer of HTTP/1")
        return _Answer(version[1], int(version[2]), head.lower()), read

    def has_more(self, length: int) -> bool:
        """More has come than a body of so many bytes: what comes next cannot be told from it."""
        return self._came - self._body > length

    def read(self, length: int) -> bytearray:
        """So many bytes of the body, or fewer if it ends."""
        body = bytearray(length)
        have = min(self._came - self._body, length)
        body[:have] = self._view[self._body : self._body + have]
        with memoryview(body) as room:
            while have < length and (got := self.socket.recv_into(room[have:])):
                have += got
        del body[have:]
        return body

    def refusal(self, answer: _Answer) -> Exception:
        """The error that an answer is."""
        if answer.status < 300:
            return Unspoken(f"an answer of status {answer.status}")
        words = self._view[self._body : self._came].tobytes()
        length = answer.field(b"content-length")
        most = min(int(length), _WORDS_BYTES) if _NUMBER.fullmatch(length) else _WORDS_BYTES
        self.socket.settimeout(_WORDS_SECONDS)
        with contextlib.suppress(OSError):  # the status says enough
            while len(words) < most and not _WORDS_END.search(words):
                words += (more := self.socket.recv(_WORDS_BYTES))
                if not more:
                    break
        code = _CODE.search(words)
        return Refused(answer.status, code[1].decode() if code else "")

    def close(self) -> None:
        self.socket.close()


def exchange(
    connection: socket.socket, request: bytes, head: bytearray, target: memoryview | None
) -> tuple[int, int]:
    """Send a request, and receive its answer's head; and its body, if that is what was hoped for.

    Args:
        connection: it blocks.
        request: all of it.
        head: to receive into until the head has ended; more may come with it.
        target: where a body of just this length goes, of an answer of status 200 or 206.

    Returns:
        How much is in ``head``; and how much of the body is in ``target``, -1: nothing was put
        there. Both are less than hoped for if the connection ends [bytes].
    """
    connection.sendall(request)
    came, end = 0, -1
    with memoryview(head) as room:
        while end < 0 and came < len(head) and (got := connection.recv_into(room[came:])):
            came += got
            end = head.find(b"\r\n\r\n", 0, came)
        hoped = _HOPED.match(head, 0, end + 2) if end >= 0 else None
        if target is None or hoped is None or int(hoped[1]) != len(target):
            return came, -1
        read = min(came - end - 4, len(target))
        target[:read] = room[end + 4 : end + 4 + read]
    wait = socket.MSG_WAITALL
    while read < len(target) and (got := connection.recv_into(target[read:], 0, wait)):
        read += got
    return came, read


def _exchange(
    connection: socket.socket, request: bytes, head: bytearray, target: memoryview | None
) -> tuple[int, int]:
    if native is None:
        return exchange(connection, request, head, target)
    return native(connection.fileno(), request, head, target)


def _connected(address: tuple[str, int], call: Call) -> socket.socket:
    """A socket to one of a name's addresses, which share the load."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for family, kind, protocol, _, where in random.sample(found, len(found)):
        try:
            return _made(socket.socket(family, kind, protocol), where, call)
        except OSError as error:
            failure = error.with_traceback(None)  # whose frame has this variable, and the call
    raise failure or OSError("no address")


def _made(connection: socket.socket, where: Any, call: Call) -> socket.socket:
    """This socket, connected."""
    try:
        call.waits_for(connection)
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(where)
        connection.settimeout(None)  # whoever waits for it shuts it down
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        call.waits_for(None)
        connection.close()
        raise
    return connection


class Signer:
    """Signs GETs as S3 wants them: AWS Signature Version 4."""

    def __init__(self, access: Access, host: str) -> None:
        """Sign in the name of ``access``, for the server that calls itself ``host``."""
        self._id, self._secret, token = (access.secrets.get(name, "") for name in AWS_KEYS)
        self._region = access.region_in_force
        self._names = "host;x-amz-content-sha256;x-amz-date"
        self._names += ";x-amz-security-token" if token else ""
        self._token = f"x-amz-security-token:{token}" if token else ""
        self._host = host
        self._day = ("", b"")
        """A day, and the key that is made for it."""

    def get(self, path: str, offset: int, length: int, moment: float | None = None) -> bytes:
        """A request of HTTP/1.1.

        Args:
            path: of the object, percent-encoded, with the bucket.
            offset: of the first byte [bytes].
            length: how many [bytes].
            moment: of signing; ``None``: now [s since 1970].
        """
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(moment))
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        fields = [f"host:{self._host}", f"x-amz-content-sha256:{_EMPTY}", f"x-amz-date:{now}"]
        fields += [self._token] if self._token else []
        canonical = "\n".join(["GET", path, "", *fields, "", self._names, _EMPTY])
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        signed = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}"
        signature = hmac.digest(self._key(now[:8]), signed.encode(), "sha256").hex()
        lines = [
            f"GET {path} HTTP/1.1",
            *fields,
            f"range:bytes={offset}-{offset + length - 1}",
            f"authorization:AWS4-HMAC-SHA256 Credential={self._id}/{scope}, "
            f"SignedHeaders={self._names}, Signature={signature}",
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    def _key(self, day: str) -> bytes:
        known, key = self._day
        if known != day:
            key = f"AWS4{self._secret}".encode()
            for word in (day, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, word.encode(), "sha256")
            self._day = day, key
        return key


def reaches(access: Access) -> bool:
    """Whether this client can be used: an endpoint of plain HTTP, no proxy between, and keys.

    What goes into a request's head must be plain ASCII without blanks.
    """
    try:
        server = urlsplit(access.endpoint)
        host, _ = (server.hostname or "").encode("idna"), server.port
    except ValueError:  # others have words for it
        return False
    if server.scheme != "http" or not host or server.path.strip("/"):
        return False
    said = [server.netloc, access.region_in_force]
    said += [access.secrets[name] for name in AWS_KEYS if access.secrets.get(name)]
    if server.username is not None or not access.has_keys or not all(map(_PLAIN.fullmatch, said)):
        return False
    return not _is_proxied(server.netloc)


def _is_proxied(host: str) -> bool:
    """Requests to this host should go through somebody else."""
    proxies = urllib.request.getproxies()
    return ("http" in proxies or "all" in proxies) and not urllib.request.proxy_bypass(host)
