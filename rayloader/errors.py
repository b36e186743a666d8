"""Every way rayloader fails.

::

    RayloaderError
    ├── OptionError (ValueError)              an option, or a combination of them, is wrong
    ├── UsageError (RuntimeError)             a call not allowed here and now
    ├── CatalogError (ValueError)             the list of what exists cannot be made or read
    │   ├── EmptyCatalog                      nothing to read
    │   └── CatalogMismatch                   two ranks see different catalogs
    ├── StateMismatch (ValueError)            a saved position belongs to another run
    ├── ReceiptError (ValueError)             receipts that were written are missing or malformed
    ├── StorageError (OSError)                one stored object could not be read
    │   ├── ObjectNotFound (FileNotFoundError)
    │   │   └── BucketNotFound                the whole bucket or container does not exist
    │   ├── AccessDenied (PermissionError)
    │   │   └── CredentialsRejected           the storage does not know who asks
    │   │       └── CredentialsExpired        it did, until they ran out
    │   ├── NotRegularFile                    a directory, FIFO, socket or device
    │   ├── Truncated                         it ended before its own size
    │   ├── Replaced                          another object than the one that was listed
    │   ├── Throttled                         the storage asks for fewer requests, too long
    │   ├── ServerFailure                     the storage answers that it fails, too long
    │   ├── Unreachable (ConnectionError)     refused, reset or not found, too long
    │   │   └── TlsFailure                    no trusted connection to the endpoint
    │   ├── TimedOut (TimeoutError)           no request ended within ``request_timeout``
    │   ├── RangeIgnored                      the storage sends the whole for a part
    │   ├── DirectUnsupported                 O_DIRECT refused here
    │   └── StorageStalled (TimeoutError)     no answer within ``read_timeout``
    ├── SkipBudgetExceeded                    more samples failed than ``on_error="skip"`` allows
    ├── BatchTooLarge (MemoryError)           a batch cannot fit in ``memory_bytes``
    ├── ReaderError (RuntimeError)
    │   ├── ReaderLost                        the reader died more often than max_restarts
    │   └── ChannelError                      reader and trainer misunderstand each other
    └── ClusterError (ConnectionError)
        ├── ClusterUnreachable                no Ray answers at the address
        └── PlacementFailed                   Ray cannot place the reader on its rank's node

The first line of every message is complete in itself. All of them pickle, with their
notes, and with causes that are errors of rayloader too.
"""

from __future__ import annotations

import errno as _errno
import os
from typing import Any


class RayloaderError(Exception):
    """Base of every error that rayloader raises on purpose.

    A cause that is one of them too travels along when it is pickled.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        made: Any = super().__reduce__()
        return made[0], made[1], self._with_cause(self.__dict__)

    def _with_cause(self, state: dict[str, Any]) -> dict[str, Any]:
        """What is set anew after unpickling, by attributes' names."""
        cause = self.__cause__
        return state | {"__cause__": cause} if isinstance(cause, RayloaderError) else state


class OptionError(RayloaderError, ValueError):
    """An option, or a combination of options, is wrong."""


class UsageError(RayloaderError, RuntimeError):
    """A call that this object, process or moment does not allow."""


class CatalogError(RayloaderError, ValueError):
    """The list of what exists cannot be made or read."""


class EmptyCatalog(CatalogError):
    """The source holds nothing to read, or fewer entries than ranks."""


class CatalogMismatch(CatalogError):
    """Ranks of one run see different catalogs."""


class StateMismatch(RayloaderError, ValueError):
    """A saved position belongs to another catalog, list or seed."""


class ReceiptError(RayloaderError, ValueError):
    """Receipts that a run has written are missing, or are no such records."""


class StorageError(RayloaderError, OSError):
    """One stored object could not be read.

    Attributes:
        key: the object's name as the user knows it.
        cause: what went wrong, in words.
        errno: the operating system's number, or 0 where there is none.
        endpoint: of object storage, where requests went; empty for files.
    """

    endpoint: str = ""

    def __init__(self, key: str, cause: str, errno: int = 0) -> None:
        super().__init__(errno, cause, key)
        self.key = key
        self.cause = cause

    def __str__(self) -> str:
        return f"{printable(self.key)}: {self.cause}"

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._with_cause(self.__dict__)
        return type(self), (self.key, self.cause, self.errno or 0), state


class ObjectNotFound(StorageError, FileNotFoundError):
    """The object does not exist."""


class BucketNotFound(ObjectNotFound):
    """The bucket or container does not exist at this endpoint."""


class AccessDenied(StorageError, PermissionError):
    """The object exists and may not be read."""


class CredentialsRejected(AccessDenied):
    """The credentials are missing, unknown to the storage, or do not fit together."""


class CredentialsExpired(CredentialsRejected):
    """The credentials were valid once."""


class NotRegularFile(StorageError):
    """The name belongs to a directory, FIFO, socket or device."""


class Truncated(StorageError):
    """The object ended before the size it had when it was opened."""


class Replaced(StorageError):
    """The object is not the one that was listed, or changed while it was read."""


class Throttled(StorageError):
    """The storage asked for fewer requests until the time for trying again was over."""


class ServerFailure(StorageError):
    """The storage answered that it fails until the time for trying again was over."""


class Unreachable(StorageError, ConnectionError):
    """No connection to the endpoint holds."""


class TlsFailure(Unreachable):
    """The endpoint's certificate is not trusted, or it does not speak TLS."""


class TimedOut(StorageError, TimeoutError):
    """A request did not end within ``request_timeout``, however often it was tried."""


class RangeIgnored(StorageError):
    """The storage sends the whole object where a range was asked for."""


class DirectUnsupported(StorageError):
    """The file system refuses O_DIRECT for this file."""


class StorageStalled(StorageError, TimeoutError):
    """The storage gave no answer within ``read_timeout``."""


class SkipBudgetExceeded(RayloaderError):
    """More samples failed than ``on_error="skip"`` allows."""


class BatchTooLarge(RayloaderError, MemoryError):
    """A batch cannot fit in ``memory_bytes``; the message names the figure to set."""


class ReaderError(RayloaderError, RuntimeError):
    """The reader process, not the storage, failed."""


class ReaderLost(ReaderError):
    """The reader died more often than ``max_restarts`` allows, or cannot be started again."""


class ChannelError(ReaderError):
    """Reader and trainer misunderstand each other."""


class ClusterError(RayloaderError, ConnectionError):
    """Ray cannot be reached or used."""


class ClusterUnreachable(ClusterError):
    """No Ray answers at the address within the deadline."""


class PlacementFailed(ClusterError):
    """Ray cannot place the reader on its rank's node."""


def storage_error(key: str, errno: int) -> StorageError:
    """The typed error for an operating-system error number on one object."""
    if errno in (_errno.ENOENT, _errno.ENOTDIR):
        return ObjectNotFound(key, "no such file", errno)
    if errno in (_errno.EACCES, _errno.EPERM):
        return AccessDenied(key, "permission denied", errno)
    if errno in (_errno.EISDIR, _errno.ENXIO, _errno.ENODEV):
        return NotRegularFile(key, "not a regular file", errno)
    return StorageError(key, os.strerror(errno), errno)


def chained(cause: BaseException) -> BaseException | None:
    """What an error that tells all is raised ``from``: nothing, or with RAYLOADER_DEBUG its cause.

    For causes of other libraries, whose own words are screens of their internals.
    """
    return cause if os.environ.get("RAYLOADER_DEBUG") else None


def printable(key: str) -> str:
    """A name as it may stand in a message: one line, no control or undecodable characters."""
    return key if key.isprintable() else ascii(key)[1:-1]


def counted(number: int, one: str) -> str:
    """A number of things in words: 1 rank, 2 ranks, 1,000 ranks."""
    return f"{number:,} {one}{'s' * (number != 1)}"


__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, RayloaderError)
]
