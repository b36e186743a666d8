"""An S3 endpoint that takes its time: GETs from memory, each answered after a fixed latency.

Method: requests wait side by side, as many as come, without a thread each; a body is sent with one
system call. It must itself be quick where 64 requests per 20 ms are asked of it, which is why it is
no proxy: it knows the files from the start. It checks no signatures.

Command: ``python -m benchmarks.slow_server DIRECTORY LATENCY`` serves ``/bucket/key`` from
``DIRECTORY/bucket/key``; it prints its endpoint, and ends with its standard input. A line on it is
answered with the most requests that were in flight at once since the line before.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import sys
import urllib.parse
from pathlib import Path

ROOM = 4 << 20
"""Of a socket's send buffer: a whole body, so that sending does not wait [bytes]."""
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d*)", re.IGNORECASE)


class Objects:
    """All bodies, read once, and the requests in flight."""

    def __init__(self, root: Path, latency: float) -> None:
        self.latency = latency
        self.in_flight = self.peak = 0
        self._root = root
        self._known: dict[bytes, tuple[bytes, bytes]] = {}

    def find(self, target: bytes) -> tuple[bytes, bytes] | None:
        """A body and its ETag."""
        path = target.partition(b"?")[0]
        if path not in self._known:
            file = self._root / urllib.parse.unquote(path.decode()).removeprefix("/")
            if not file.is_file():
                return None
            body = file.read_bytes()
            self._known[path] = body, hashlib.md5(body, usedforsecurity=False).hexdigest().encode()
        return self._known[path]


class Connection(asyncio.Protocol):
    """One connection: request after request."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make room for whole bodies."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)

    def data_received(self, data: bytes) -> None:
        """A request, or a part of one."""
        self._read += data
        while b"\r\n\r\n" in self._read:
            head, self._read = self._read.split(b"\r\n\r\n", 1)
            objects = self._objects
            objects.in_flight += 1
            objects.peak = max(objects.peak, objects.in_flight)
            asyncio.get_running_loop().call_later(objects.latency, self._answer, head)

    def _answer(self, head: bytes) -> None:
        method, target, _ = head.split(b" ", 2)
        found = self._objects.find(target)
        if found is None:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            self._send(method, head, *found)
        self._objects.in_flight -= 1

    def _send(self, method: bytes, head: bytes, body: bytes, etag: bytes) -> None:
        status, more, size = b"200 OK", b"", len(body)
        if asked := _RANGE.search(head):
            first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
            body = body[first : last + 1]
            status, more = b"206 Partial Content", b"Content-Range: bytes %d-%d/%d\r\n" % (
                first, last, size,
            )  # fmt: skip
        self._transport.write(
            b'HTTP/1.1 %s\r\nContent-Length: %d\r\nETag: "%s"\r\n%s'
            b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n\r\n"
            % (status, len(body), etag, more)
        )
        if method == b"GET":
            self._transport.write(body)


async def _main(root: str, latency: str) -> None:
    objects = Objects(Path(root), float(latency))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(objects), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while await orders.readline():
        print(objects.peak, flush=True)
        objects.peak = objects.in_flight


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
