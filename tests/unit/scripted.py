"""A server that answers what it is told to, whatever it is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
import threading


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer, and what becomes of its connection then: ``kept``, ``closed`` or ``reset``."""

    words: bytes
    then: str = "kept"


def partial(body, offset=0, total=None, *fields, version="1.1"):
    """The answer to a range."""
    total = offset + len(body) if total is None else total
    span = f"content-range: bytes {offset}-{offset + len(body) - 1}/{total}"
    lines = [f"HTTP/{version} 206 Partial Content", span, f"content-length: {len(body)}", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Server:
    """Listens on 127.0.0.1; each request gets the next of its answers, then there is silence."""

    def __init__(self, *answers):
        self.answers = [
            answer if isinstance(answer, Answer) else Answer(answer) for answer in answers
        ]
        self.requests = []
        """Which connection each came on, and its text."""
        self.asked = threading.Semaphore(0)
        """Released by each request."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def asked_on(self):
        """Which connection each request came on."""
        return [number for number, _ in self.requests]

    def ranges(self):
        return [
            tuple(map(int, re.search(r"\r\nrange:bytes=(\d+)-(\d+)\r\n", text).groups()))
            for _, text in self.requests
        ]

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                serve = threading.Thread(
                    target=self._serve, args=(len(self._connections), connection)
                )
                self._connections.append(connection)
                self._threads.append(serve)
                serve.start()

    def _serve(self, number, connection):
        heard = b""
        with connection, contextlib.suppress(OSError):
            while more := connection.recv(1 << 16):
                heard += more
                while b"\r\n\r\n" in heard:
                    head, _, heard = heard.partition(b"\r\n\r\n")
                    self.requests.append((number, head.decode() + "\r\n"))
                    answer = self.answers.pop(0) if self.answers else Answer(b"")
                    connection.sendall(answer.words)
                    if answer.then == "reset":
                        connection.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                        )
                    self.asked.release()
                    if answer.then != "kept":
                        return
