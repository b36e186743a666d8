"""s3dlio, as this process may use it: imported once, set up once, never after a fork.

It reads its settings from the environment at its first use, keeps one client for the whole process,
and in a forked child of a process that has used it every call hangs for ever. So the first storage
of a process decides; a later one that wants other credentials is refused.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Iterator
from typing import Any
from urllib.parse import urlsplit

from rayloader.errors import OptionError, UsageError
from rayloader.storage.access import Access

_FORCED = {
    # Requests are sent again by the storage, which counts them; s3dlio's own attempts would nest.
    "S3DLIO_MAX_RETRY_ATTEMPTS": "1",
    # Else every object costs a HEAD before its GET.
    "S3DLIO_ENABLE_RANGE_OPTIMIZATION": "0",
    # The storage has its own deadline, which also ends what trickles.
    "S3DLIO_OPERATION_TIMEOUT_SECS": "86400",
    # Whoever gave credentials gave all there are.
    "AWS_EC2_METADATA_DISABLED": "true",
}
_PREFERRED = {
    "S3DLIO_CONNECT_TIMEOUT_SECS": "10",
    "S3DLIO_POOL_MAX_IDLE_PER_HOST": "4096",
}
"""Unless the user says otherwise."""
_HEAVY = ("torch", "jax", "tensorflow")
"""s3dlio imports these where they are installed, and needs none of them here."""

_lock = threading.Lock()
_used: tuple[int, Access] | None = None
"""Process and access of the first use."""


class Client:
    """The calls that the storage makes. All need a running asyncio loop; results are awaitable."""

    def __init__(self, module: Any, server: str) -> None:
        """Call ``module``; ``server`` is ``host:port`` where it is not the process's own."""
        self._module = module
        self._server = server

    @property
    def can_bundle(self) -> bool:
        """``get_many`` reaches the process's own server only."""
        return not self._server

    def uri(self, name: str) -> str:
        """An object's URI, spelled so that the request goes to this client's server."""
        if not self._server:
            return name
        scheme, _, rest = name.partition("://")
        return f"{scheme}://{self._server}/{rest}"

    def get_into(self, uri: str, target: memoryview, length: int) -> Awaitable[int]:
        """GET an object of exactly ``length`` bytes into ``target``."""
        future: Awaitable[int] = self._module.get_into_async(uri, target, expected_len=length)
        return future

    def get_many(self, uris: list[str]) -> Awaitable[list[tuple[str, Any]]]:
        """GET all of several objects at once: (URI, what exports its bytes), in no order.

        One that fails fails all.
        """
        future: Awaitable[list[tuple[str, Any]]] = self._module.get_many_async(
            uris, max_in_flight=len(uris)
        )
        return future

    def get_range(self, uri: str, offset: int, length: int) -> Awaitable[Any]:
        """GET some bytes of an object, as something that exports them."""
        future: Awaitable[Any] = self._module.get_range_async(uri, offset, length)
        return future

    def head(self, uri: str) -> Awaitable[Any]:
        """HEAD: ``size`` and ``etag``, or ``None`` where there is no such object (or bucket)."""
        future: Awaitable[Any] = self._module.head_async(uri)
        return future

    def put(self, uri: str, data: bytes) -> Awaitable[None]:
        """PUT an object."""
        future: Awaitable[None] = self._module.put_bytes_async(uri, data)
        return future

    def list(self, uri: str) -> list[str]:
        """The URIs of all objects below a directory-like URI; blocks until all are there."""
        found: list[str] = self._module.list(uri, recursive=True)
        return found


def open_client(access: Access) -> Client:
    """The client of this process.

    Raises:
        OptionError: s3dlio is not installed.
        UsageError: see the module.
    """
    global _used
    with _lock:
        if _used is not None and _used[0] != os.getpid():
            raise UsageError(
                "this process was forked from one that had used object storage, and cannot use it: "
                "start it by spawn, or let the parent use object storage after the fork"
            )
        _set(_FORCED)  # some are read anew at each call
        if _used is None:
            module = _first_import(access)
            _used = (os.getpid(), access)
            return Client(module, "")
        return Client(sys.modules["s3dlio"], _another_server(_used[1], access))


def _another_server(first: Access, access: Access) -> str:
    """``host:port`` of an access that differs from the first; empty where it does not."""
    if access == first:
        return ""
    same_keys = dict(access.secrets) == dict(first.secrets)
    server = urlsplit(access.endpoint)
    plain = server.scheme == urlsplit(first.endpoint).scheme == "http" and server.port
    if same_keys and access.endpoint == first.endpoint:
        return ""
    if not (same_keys and plain):
        raise UsageError(
            f"this process has used object storage at {first.destination} already; s3dlio keeps "
            "its credentials and certificates for as long as the process lives"
        )
    return server.netloc


def _set(variables: dict[str, str]) -> None:
    """Set those that are not so yet: a thread of s3dlio's may be reading the environment."""
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _first_import(access: Access) -> Any:
    cpus = str(max(2, len(os.sched_getaffinity(0))))
    preferred = {**_PREFERRED, "S3DLIO_RT_THREADS": cpus}
    _set({name: value for name, value in preferred.items() if name not in os.environ})
    _set(access.environment())
    try:
        with _hidden(_HEAVY):
            import s3dlio
    except ImportError as error:
        raise OptionError(
            "object storage needs s3dlio, which there is for Python 3.11 to 3.13: "
            "pip install s3dlio"
        ) from error
    # Its own guess divides by the ranks of MPI, and takes a rank's mask for the machine.
    s3dlio.configure_tokio_threads(int(os.environ["S3DLIO_RT_THREADS"]))
    return s3dlio


@contextlib.contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Modules that nobody has imported yet cannot be imported for a while."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
