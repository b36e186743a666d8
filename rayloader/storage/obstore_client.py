"""obstore, which brings small objects for about half of the CPU time that s3dlio takes.

It gives bytes, which have to be copied into place; so it reads what is small. It cannot spell every
key: those with empty parts or control characters are s3dlio's, and so is everything but reading.
"""

from __future__ import annotations

import datetime
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from rayloader.errors import OptionError
from rayloader.storage.access import AWS_KEYS, Access

_UNSPEAKABLE = re.compile(r"//|/$|[\x00-\x1f\x7f]")
"""In what follows ``s3://``: obstore would fold or refuse it."""
_ANOTHER_AMAZON = re.compile(r"cn-|[a-z]+-iso")
"""Regions whose S3 is not below ``amazonaws.com``, which is all that obstore knows."""
_log = logging.getLogger(__name__)


class ObstoreClient:
    """GETs of parts of S3 objects. Needs a running asyncio loop; results are awaitable."""

    def __init__(self, module: Any, access: Access) -> None:
        """Call ``module`` in the name of ``access``, which has keys."""
        self._get = module.get_range_async
        self._new = module.store.S3Store
        self._settings = _settings(access)
        self._stores: dict[str, Any] = {}
        self._store("any")  # what is wrong with the settings shows now

    def spells(self, uri: str) -> bool:
        """Whether this object can be asked for by its own name."""
        return uri.startswith("s3://") and not _UNSPEAKABLE.search(uri, len("s3://"))

    def get(self, uri: str, offset: int, length: int) -> Awaitable[Any]:
        """GET some bytes of an object, as something that exports them; fewer where it ends."""
        bucket, _, key = uri[len("s3://") :].partition("/")
        store = self._stores.get(bucket) or self._store(bucket)
        future: Awaitable[Any] = self._get(store, key, start=offset, length=length)
        return future

    def _store(self, bucket: str) -> Any:
        return self._stores.setdefault(bucket, self._new(bucket, **self._settings))


def _settings(access: Access) -> dict[str, Any]:
    """Requests go where s3dlio's go, once, and for as long as the storage lets them."""
    client: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": "10s",
        "pool_idle_timeout": "5min",
        "timeout": "1day",
    }
    if access.ca_bundle:
        client["root_certificate"] = Path(access.ca_bundle).read_bytes()
    keys = {name.lower(): value for name, value in access.secrets.items() if name in AWS_KEYS}
    return {
        **keys,
        "endpoint": access.endpoint or access.destination,
        "region": access.region_in_force,
        "virtual_hosted_style_request": False,
        "client_options": client,
        "retry_config": {"max_retries": 0, "retry_timeout": datetime.timedelta(days=1)},
    }


_lock = threading.Lock()
_kept: tuple[int, Access, ObstoreClient] | None = None
"""Process, access and client of the last use: its connections outlive the storage."""


def open_obstore(access: Access, *, required: bool) -> ObstoreClient | None:
    """The client of an access, or ``None`` where s3dlio must do: it has no keys, say.

    Args:
        access: where requests go, and in whose name.
        required: that it is not installed is an error.

    Raises:
        OptionError: it is required, and not installed.
    """
    global _kept
    if not is_installed():
        if required:
            raise OptionError("client='obstore' needs obstore: pip install obstore")
        return None
    elsewhere = not access.endpoint and _ANOTHER_AMAZON.match(access.region_in_force)
    if elsewhere or not access.has_keys:
        return None
    import obstore
    import obstore.store

    with _lock:
        if _kept is None or _kept[:2] != (os.getpid(), access):
            try:
                _kept = os.getpid(), access, ObstoreClient(obstore, access)
            except (OSError, ValueError) as error:  # s3dlio will say so in its own words
                _log.debug("obstore cannot be used: %s", access.blotted(str(error)))
                return None
        return _kept[2]


def is_installed() -> bool:
    """Whether there is obstore."""
    return importlib.util.find_spec("obstore") is not None
