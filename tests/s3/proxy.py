"""A proxy before an S3 server: sees every request, and makes the trouble that it is told to make.

``Proxy`` starts it as a process of its own, so that what it costs and what it has open are not the
test's; it is told what to do with lines of JSON. A request goes on as it came, its signature
included, unless a ``Trouble`` matches; the first one that does decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 18
"""Bytes of a body that are passed on at once."""
PATIENCE = 10.0
"""An order to the proxy is carried out by then [s]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trouble:
    """What happens to which requests.

    Attributes:
        method: of the request; empty: any.
        key: regular expression, found in ``bucket/key``; empty: any.
        skip: so many that match go on unharmed first.
        times: so many are harmed; ``None``: all.
        delay: before the answer [s].
        hold: no answer before ``release``.
        status: answer with this, and do not ask the server.
        code: of S3, in the body of such an answer.
        body: of such an answer, instead of an error's; only text.
        headers: added to the answer, or put in the place of its own.
        cut: end the connection after so many bytes of the body.
        reset: the same, hard (RST); 0 is before the answer's first byte.
        short: send so many bytes of the body as if they were all of it.
        stall: send no more than so many bytes of the body before ``release``.
        pace: of the body [bytes/s]; 0: as fast as it comes.
    """

    method: str = ""
    key: str = ""
    skip: int = 0
    times: int | None = None
    delay: float = 0.0
    hold: bool = False
    status: int = 0
    code: str = ""
    body: str = ""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    cut: int | None = None
    reset: int | None = None
    short: int | None = None
    stall: int | None = None
    pace: float = 0.0

    def concerns(self, method: str, path: str) -> bool:
        """Whether a request is one of those that are meant."""
        return self.method in ("", method) and re.search(self.key, path, re.DOTALL) is not None


@dataclasses.dataclass(frozen=True)
class Seen:
    """One request as the server sees it.

    Attributes:
        method: GET, HEAD, …
        path: ``bucket/key``, decoded.
        query: as it came.
        headers: as they came, names in small letters; not those that carry credentials.
        status: of the answer; 0 when there was none.
        bytes: of the answer's body that were sent [bytes].
        began: when its head had arrived, CLOCK_MONOTONIC [s].
        ended: when the last byte had been sent, or the connection was gone [s].
        in_flight: requests in flight when it began, itself included.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    status: int
    bytes: int
    began: float
    ended: float
    in_flight: int


class Proxy:
    """The proxy, from the outside: ``with Proxy(upstream) as proxy``.

    Args:
        upstream: the server's endpoint.
        log: a file for what it may have to say.
        remember: answer GETs that were seen before without the server: a quick one, with no disk.
    """

    def __init__(self, upstream: str, log: Path, *, remember: bool = False) -> None:
        self._command = [sys.executable, "-m", "tests.s3.proxy", str(os.getpid()), upstream]
        self._command += ["remember"] * remember
        self._log = log
        self._latency = 0.0

    def __enter__(self) -> Proxy:
        with open(self._log, "ab") as errors:
            self._popen = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )
        self.endpoint: str = self._answer()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(3)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()

    def trouble(self, **what: Any) -> int:
        """Make trouble from now on (fields of ``Trouble``); its number."""
        Trouble(**what)
        return self._ask("trouble", what)

    def clear(self) -> None:
        """No more trouble, no latency; what is held goes on."""
        self._ask("clear")
        self._latency = 0.0

    def release(self, number: int) -> None:
        """Let go on what a trouble holds, now and from now on."""
        self._ask("release", number)

    def met(self, number: int) -> int:
        """How many requests a trouble has met so far."""
        return self._ask("met", number)

    def wait_for(self, number: int, count: int = 1) -> None:
        """Until a trouble has met so many requests."""
        deadline = time.monotonic() + PATIENCE
        while self.met(number) < count:
            assert time.monotonic() < deadline, f"only {self.met(number)} requests came"
            time.sleep(0.002)

    def seen(self, method: str = "", key: str = "") -> list[Seen]:
        """The requests that have ended since ``forget``, in the order of their ends."""
        chosen = Trouble(method=method, key=key)
        everything = (Seen(**entry) for entry in self._ask("seen"))
        return [entry for entry in everything if chosen.concerns(entry.method, entry.path)]

    def forget(self) -> None:
        """Begin a new record of requests and a new peak."""
        self._ask("forget")

    @property
    def peak(self) -> int:
        """The most requests in flight at once since ``forget``."""
        return self._ask("peak")

    @property
    def in_flight(self) -> int:
        """Requests in flight now."""
        return self._ask("in_flight")

    @property
    def latency(self) -> float:
        """Before every answer [s]; settable."""
        return self._latency

    @latency.setter
    def latency(self, seconds: float) -> None:
        self._ask("latency", seconds)
        self._latency = seconds

    def upstream(self, endpoint: str) -> None:
        """Send requests to another server from now on."""
        self._ask("upstream", endpoint)

    def go_away(self) -> None:
        """Refuse connections, and reset those that there are."""
        self._ask("go_away")

    def come_back(self) -> None:
        """Be there again, at the same address."""
        self._ask("come_back")

    def _ask(self, order: str, *words: Any) -> Any:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps([order, *words]).encode() + b"\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._popen.stdout is not None
        line, deadline = b"", time.monotonic() + PATIENCE
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._popen.stdout], [], [], left)
            chunk = os.read(self._popen.stdout.fileno(), 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError(f"the proxy does not answer: {self._log.read_text()[-2000:]}")
            line += chunk
        return json.loads(line)


class _Rule:
    """A trouble, and how far it has come."""

    def __init__(self, what: Trouble) -> None:
        self.what = what
        self.matched = 0
        self.met = 0
        self.free = asyncio.Event()

    def takes(self, method: str, path: str) -> bool:
        what = self.what
        if not what.concerns(method, path) or self.met == what.times:
            return False
        self.matched += 1
        if self.matched <= what.skip:
            return False
        self.met += 1
        return True


_HARMLESS = Trouble()


class _Gone(Exception):
    """The connection to the client is no more, or shall be no more."""


@dataclasses.dataclass
class _Request:
    """One request on its way."""

    head: bytes
    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    sent: int = 0

    @classmethod
    def of(cls, head: bytes) -> _Request:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        return cls(head, method, target, _fields(lines))

    @property
    def path(self) -> str:
        return urllib.parse.unquote(self.target.partition("?")[0].removeprefix("/"))


def _fields(lines: list[str]) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}


_SECRET = ("authorization", "x-amz-security-token")


class Engine:
    """The proxy, from the inside."""

    def __init__(self, upstream: str, *, remember: bool = False) -> None:
        self.upstream = upstream
        self.latency = 0.0
        self.record: list[Seen] = []
        self.in_flight = self.peak = 0
        self._rules: dict[int, _Rule] = {}
        self._numbers = itertools.count()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._clients: set[asyncio.StreamWriter] = set()
        self._memory: dict[tuple[str, str], tuple[bytes, list[bytes]]] | None = None
        if remember:
            self._memory = {}
        self._server: asyncio.Server | None = None
        self.port = 0

    # Orders

    async def listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=BLOCK, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def obey(self, order: str, *words: Any) -> Any:
        """Carry out one order of ``Proxy``."""
        if order == "trouble":
            number = next(self._numbers)
            self._rules[number] = _Rule(Trouble(**words[0]))
            return number
        if order == "clear":
            for rule in self._rules.values():
                rule.free.set()
            self._rules.clear()
            self.latency = 0.0
        elif order == "release":
            self._rules[words[0]].free.set()
        elif order == "met":
            return self._rules[words[0]].met
        elif order == "seen":
            return [dataclasses.asdict(entry) for entry in self.record]
        elif order == "forget":
            self.record, self.peak = [], self.in_flight
        elif order in ("peak", "in_flight"):
            return getattr(self, order)
        elif order == "latency":
            self.latency = words[0]
        elif order == "upstream":
            self.upstream = words[0]
            self._hang_up()
        elif order == "go_away":
            await self._go_away()
        elif order == "come_back":
            await self.listen()
        else:
            raise ValueError(order)
        return None

    async def _go_away(self) -> None:
        """Refuse and reset; when this returns, that has happened to every connection."""
        assert self._server is not None
        self._server.close()
        ended = list(self._clients)
        for writer in ended:
            _reset(writer)
        # ``abort`` only plans the end. Who asks before it comes would be reset, not refused.
        await asyncio.gather(*(writer.wait_closed() for writer in ended), return_exceptions=True)

    def _hang_up(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    # One connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._server is not None
        if not self._server.is_serving():  # it was accepted just before
            _reset(writer)
            return
        writer.transport.set_write_buffer_limits(0)  # sent is what the kernel has
        self._clients.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await self._one(_Request.of(head), reader, writer)
        except (OSError, EOFError, _Gone, asyncio.IncompleteReadError):
            pass
        finally:
            self._clients.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _one(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        began, in_flight = time.monotonic(), self.in_flight
        try:
            await self._take_body(request, reader, writer)
            await self._answer(request, reader, writer)
        finally:
            self.in_flight -= 1
            shown = {k: v for k, v in request.headers.items() if k not in _SECRET}
            query = request.target.partition("?")[2]
            self.record.append(
                Seen(
                    method=request.method,
                    path=request.path,
                    query=query,
                    headers=shown,
                    status=request.status,
                    bytes=request.sent,
                    began=began,
                    ended=time.monotonic(),
                    in_flight=in_flight,
                )
            )

    async def _take_body(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if length := int(request.headers.get("content-length", 0)):
            request.body = await reader.readexactly(length)
        elif "chunked" in request.headers.get("transfer-encoding", ""):
            request.body = b"".join([block async for block in _chunks(reader)])

    async def _answer(
        self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        rule = next(
            (r for r in self._rules.values() if r.takes(request.method, request.path)), None
        )
        what = rule.what if rule else _HARMLESS
        if delay := what.delay + self.latency:
            await asyncio.sleep(delay)
        if rule and what.hold:
            await _released(rule, reader)
        if what.reset == 0:
            _reset(writer)
            raise _Gone
        if what.status:
            await self._refuse(request, what, writer)
            return
        head, body = await self._ask(request)
        if rule:
            head = _changed(head, what)
        request.status = int(head.split(b" ", 2)[1])
        writer.write(head)
        async for block in body:
            await self._send(request, rule, block, reader, writer)
        await writer.drain()
        if b"\r\nconnection: close" in head.lower():
            raise _Gone

    async def _send(
        self,
        request: _Request,
        rule: _Rule | None,
        block: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Pass on a part of a body, as far as it may go."""
        if rule is None:
            writer.write(block)
            request.sent += len(block)
            await writer.drain()
            return
        what = rule.what
        ends = [end for end in (what.cut, what.reset, what.short) if end is not None]
        block = block[: max(0, min(ends) - request.sent)] if ends else block
        if what.stall is not None and not rule.free.is_set():
            now = max(0, what.stall - request.sent)
            await self._drip(request, block[:now], what.pace, writer)
            block = block[now:]
            if block or what.stall == request.sent:
                await _released(rule, reader)
        await self._drip(request, block, what.pace, writer)
        if what.cut is not None and request.sent >= what.cut:
            raise _Gone
        if what.reset is not None and request.sent >= what.reset:
            await asyncio.sleep(0.02)  # the client has taken what was sent
            _reset(writer)
            raise _Gone

    async def _drip(
        self, request: _Request, block: bytes, pace: float, writer: asyncio.StreamWriter
    ) -> None:
        step = max(1, int(pace / 50)) if pace else max(1, len(block))
        for at in range(0, len(block), step):
            drop = block[at : at + step]
            if pace:  # no piece is there before its time, the last one neither
                await asyncio.sleep(len(drop) / pace)
            writer.write(drop)
            await writer.drain()
            request.sent += len(drop)

    async def _refuse(self, request: _Request, what: Trouble, writer: asyncio.StreamWriter) -> None:
        """Answer in the server's place."""
        body = what.body.encode()
        if what.code:
            body = (
                '<?xml version="1.0" encoding="UTF-8"?>'
                f"<Error><Code>{what.code}</Code><Message>{what.code} of the proxy</Message>"
                "<RequestId>1</RequestId></Error>"
            ).encode()
        fields = {"Content-Length": str(len(body)), "Content-Type": "application/xml"}
        head = f"HTTP/1.1 {what.status} Trouble\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in {**fields, **what.headers}.items()
        )
        request.status = what.status
        writer.write(head.encode() + b"\r\n")
        if request.method != "HEAD":
            writer.write(body)
            request.sent = len(body)
        await writer.drain()

    # The server

    async def _ask(self, request: _Request) -> tuple[bytes, AsyncIterator[bytes]]:
        """The server's answer: its head, and its body to come."""
        if self._memory is None or request.method != "GET":
            return await self._ask_server(request)
        known = request.target, request.headers.get("range", "")
        if known not in self._memory:
            head, body = await self._ask_server(request)
            self._memory[known] = head, [block async for block in body]
        head, blocks = self._memory[known]
        return head, _each(blocks)

    async def _ask_server(self, request: _Request) -> tuple[bytes, AsyncIterator[bytes]]:
        while True:
            fresh, upstream = not self._idle, self.upstream
            reader, writer = await self._connect() if fresh else self._idle.pop()
            try:
                writer.write(request.head + request.body)
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
                while head.split(b" ", 2)[1].startswith(b"1"):
                    head = await reader.readuntil(b"\r\n\r\n")
            except (OSError, asyncio.IncompleteReadError):
                writer.close()
                if fresh:
                    raise
            else:
                return head, self._body(request, head, reader, writer, upstream)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urllib.parse.urlsplit(self.upstream)
        return await asyncio.open_connection(url.hostname, url.port, limit=BLOCK)

    async def _body(
        self,
        request: _Request,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: str,
    ) -> AsyncIterator[bytes]:
        """The answer's body, as it is on the wire; then the connection may be used again."""
        fields = _fields(head.decode("latin-1").split("\r\n"))
        reusable = fields.get("connection", "").lower() != "close"
        try:
            if request.method == "HEAD" or head.split(b" ", 2)[1] in (b"204", b"304"):
                pass
            elif "content-length" in fields:
                left = int(fields["content-length"])
                while left:
                    block = await reader.read(min(left, BLOCK))
                    if not block:
                        raise _Gone
                    left -= len(block)
                    yield block
            elif "chunked" in fields.get("transfer-encoding", ""):
                async for block in _chunks(reader):
                    yield block
            else:
                reusable = False
                while block := await reader.read(BLOCK):
                    yield block
        except BaseException:
            reusable = False
            raise
        finally:
            if reusable and upstream == self.upstream:
                self._idle.append((reader, writer))
            else:
                writer.close()


async def _each(blocks: list[bytes]) -> AsyncIterator[bytes]:
    for block in blocks:
        yield block


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A chunked body, as it is on the wire."""
    size = 1
    while size:
        line = await reader.readuntil(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        yield line + await reader.readexactly(size + 2)


async def _released(rule: _Rule, reader: asyncio.StreamReader) -> None:
    """Wait until the rule lets go, or the client has gone."""
    while not rule.free.is_set():
        if reader.at_eof() or reader.exception() is not None:
            raise _Gone
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(rule.free.wait(), 0.02)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _changed(head: bytes, what: Trouble) -> bytes:
    """An answer's head with other fields."""
    changes = dict(what.headers)
    if what.short is not None:
        changes["Content-Length"] = str(what.short)
    names = {name.lower() for name in changes}
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    kept = [line for line in lines if line.partition(":")[0].strip().lower() not in names]
    added = [f"{name}: {value}" for name, value in changes.items()]
    return "\r\n".join([first, *kept, *added, "", ""]).encode("latin-1")


async def _main(upstream: str, *more: str) -> None:
    engine = Engine(upstream, remember="remember" in more)
    await engine.listen()
    orders = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    answer: Any = f"http://127.0.0.1:{engine.port}"
    while True:
        os.writev(1, [json.dumps(answer).encode() + b"\n"])
        line = await orders.readline()
        if not line:
            return
        answer = await engine.obey(*json.loads(line))


if __name__ == "__main__":
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() == int(sys.argv[1]):
        asyncio.run(_main(*sys.argv[2:]))
