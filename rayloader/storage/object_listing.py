"""What a bucket holds: pages of keys and sizes, several prefixes at once.

S3 is listed by botocore, because s3dlio's listing has no sizes and comes only when it is complete;
Azure by s3dlio. Every key below the prefix is listed, whatever its name; but for the empty objects
with a slash at their end that consoles make to show a folder.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rayloader.config import LISTINGS_AT_ONCE
from rayloader.storage.access import Access
from rayloader.storage.bucket import s3_client
from rayloader.storage.listing import Glob
from rayloader.storage.object_errors import of_botocore
from rayloader.storage.uri import Location, location, root_of, shown

_PAGES_AHEAD = 64
"""Pages of up to 1,000 keys that wait to be taken, at most [pages]."""
_MOST_FOLDERS = 1000
"""With more prefixes than this at one level, they are not worth a request each [prefixes]."""
_PAGES_HELD = 8
"""Pages of a level that are kept back until it is known how to go on [pages]."""
_DEPTH = 4
"""Levels that are looked at for prefixes to list side by side [levels]."""

Page = list[tuple[bytes, int, bytes]]
"""(key, size [bytes], ETag without quotes) of each object."""


class S3Lister:
    """A ``Lister`` of a bucket.

    The first level below the root that has several prefixes is listed prefix by prefix, up to
    ``LISTINGS_AT_ONCE`` at once; what lies flat is listed page by page.

    Args:
        access: where the bucket is, and who asks.
        pattern: keep only keys that match this glob, relative to the root; see ``PosixLister``.
    """

    def __init__(self, access: Access, pattern: bytes | None = None) -> None:
        self._access = access
        self._filter = None if pattern is None else Glob(pattern.decode(errors="surrogateescape"))
        self.metadata_ops = 0
        """Requests sent so far [requests]."""

    def list(self, root: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (key relative to root, size [bytes]), in no particular order.

        Raises:
            StorageError: the bucket cannot be listed; the class says why.
        """
        return ((key, size) for key, size, _ in self.entries(root))

    def entries(self, root: bytes) -> Iterator[tuple[bytes, int, bytes]]:
        """As :meth:`list`, with the ETags as well."""
        place = location(root)
        with contextlib.closing(_Pages(self._access, place)) as pages:
            for page in pages:
                self.metadata_ops = pages.requests
                for key, size, etag in page:
                    relative = key[len(place.prefix) :]
                    if (size or not key.endswith(b"/")) and self._wanted(relative):
                        yield relative, size, etag
            self.metadata_ops = pages.requests

    def _wanted(self, key: bytes) -> bool:
        return bool(key) and (self._filter is None or self._filter.matches(key))


class _Pages:
    """All pages of a prefix, from several threads, in one iterator."""

    def __init__(self, access: Access, place: Location) -> None:
        self.requests = 0
        self._place = place
        self._root = shown(root_of(place))
        self._access = access
        self._client = s3_client(self._root, access)
        self._found: queue.Queue[Page | BaseException | None] = queue.Queue(_PAGES_AHEAD)
        self._stopped = threading.Event()
        """Nobody listens any more."""
        self._failed = threading.Event()
        """One listing has failed, so the others are for nothing."""
        self._thread = threading.Thread(target=self._work, name="rayloader-listing", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Page]:
        while (found := self._found.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found

    def close(self) -> None:
        """Let the threads end after the page they are at."""
        self._stopped.set()

    def _work(self) -> None:
        """List everything; then say that it is all, or what went wrong."""
        try:
            self._list()
        except BaseException as error:
            self._put(error)
        else:
            self._put(None)

    def _list(self) -> None:
        prefix = self._place.prefix.decode()
        folders = [prefix]
        for _ in range(_DEPTH):
            if len(folders) != 1:
                break
            found = self._level(folders[0])
            if found is None:
                break
            folders = found
        with ThreadPoolExecutor(LISTINGS_AT_ONCE, "rayloader-listing") as pool:
            try:
                for below in [pool.submit(self._below, folder) for folder in folders]:
                    below.result()
            except BaseException:
                self._failed.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _level(self, prefix: str) -> list[str] | None:
        """Put out what lies at one level, and return its prefixes.

        Returns:
            ``None``, with nothing put out, where prefixes are so many and entries so few that
            listing everything in one row takes fewer requests.
        """
        folders: list[str] = []
        held: list[Page] = []
        decided = False
        for answer in self._answers(prefix, Delimiter="/"):
            held.append(_entries(answer))
            folders += [found["Prefix"] for found in answer.get("CommonPrefixes", ())]
            if decided or not folders or len(held) > _PAGES_HELD:
                self._put_all(held)
                decided = True
            elif len(folders) > _MOST_FOLDERS:
                return None
        self._put_all(held)
        return folders

    def _put_all(self, pages: list[Page]) -> None:
        for page in pages:
            self._put(page)
        pages.clear()

    def _below(self, prefix: str) -> None:
        """Put out everything below a prefix."""
        for answer in self._answers(prefix):
            self._put(_entries(answer))

    def _answers(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        """The answers to one listing, until there are no more of them."""
        token: dict[str, str] = {}
        while not (self._stopped.is_set() or self._failed.is_set()):
            answer = self._ask(Prefix=prefix, **more, **token)
            yield answer
            if not answer.get("IsTruncated"):
                return
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def _ask(self, **request: str) -> dict[str, Any]:
        self.requests += 1
        try:
            answer: dict[str, Any] = self._client.list_objects_v2(
                Bucket=self._place.bucket.decode(), **request
            )
        except Exception as error:
            raise of_botocore(self._root, error, self._access) from None
        return answer

    def _put(self, found: Page | BaseException | None) -> None:
        """Hand over, waiting for room as long as anybody is listening."""
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._found.put(found, timeout=0.1)
                return


class AzureLister:
    """A ``Lister`` of a container. It has no sizes, and yields when all is listed.

    Args: as of ``S3Lister``.
    """

    def __init__(self, access: Access, pattern: bytes | None = None) -> None:
        self._access = access
        self._filter = None if pattern is None else Glob(pattern.decode(errors="surrogateescape"))
        self.metadata_ops = 0
        """Listings so far; how many requests that takes is not told [operations]."""

    def list(self, root: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (key relative to root, -1).

        Raises:
            StorageError: the container cannot be listed; the class says why.
        """
        from rayloader.storage.object_errors import of_s3dlio
        from rayloader.storage.s3dlio_client import open_client

        below = root_of(location(root)).decode() + "/"
        client = open_client(self._access)
        self.metadata_ops += 1
        try:
            found = client.list(client.uri(below))
        except RuntimeError as error:
            raise of_s3dlio(shown(root), below, error, self._access).error from None
        for uri in found:
            key = uri.removeprefix(client.uri(below)).encode()
            if key and (self._filter is None or self._filter.matches(key)):
                yield key, -1

    def entries(self, root: bytes) -> Iterator[tuple[bytes, int, bytes]]:
        """As :meth:`list`, with no ETags."""
        return ((key, size, b"") for key, size in self.list(root))


def lister_of(
    place: Location, access: Access, pattern: bytes | None = None
) -> S3Lister | AzureLister:
    """The lister of a location."""
    return _LISTERS[place.scheme](access, pattern)


_LISTERS: dict[bytes, type[S3Lister] | type[AzureLister]] = {b"s3": S3Lister, b"az": AzureLister}


def _entries(answer: dict[str, Any]) -> Page:
    return [
        (entry["Key"].encode(), entry["Size"], entry.get("ETag", "").strip('"').encode())
        for entry in answer.get("Contents", ())
    ]
