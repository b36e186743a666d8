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
from typing import Any, ClassVar


class RayloaderError(Exception):
    """Base of all below.

    A cause that is one of them too travels along when it is pickled.

    Attributes:
        cure: what to do, in a few words; every subclass has its own. docs/reference.md is made of
            these and of the first lines of the docstrings.
    """

    cure: ClassVar[str] = ""

    def __reduce__(self) -> tuple[Any, ...]:
        made: Any = super().__reduce__()
        return made[0], made[1], self._with_cause(self.__dict__)

    def _with_cause(self, state: dict[str, Any]) -> dict[str, Any]:
        """What is set anew after unpickling, by attributes' names."""
        cause = self.__cause__
        return state | {"__cause__": cause} if isinstance(cause, RayloaderError) else state


class OptionError(RayloaderError, ValueError):
    """An option, or a combination of them, is wrong."""

    cure = "the message names it and what is allowed"


class UsageError(RayloaderError, RuntimeError):
    """A call not possible here and now: closed data set, forked child, DataLoader worker."""

    cure = "see the message; ``DataLoader(dataset, batch_size=None, num_workers=0)``"


class CatalogError(RayloaderError, ValueError):
    """The source cannot be listed, or is no catalog."""

    cure = "check the path; quote a glob"


class EmptyCatalog(CatalogError):
    """Nothing to read, or fewer files than ranks."""

    cure = 'other source, fewer ranks, or ``uneven="pad"``'


class CatalogMismatch(CatalogError):
    """Ranks see different files (compared where one Ray or ``torch.distributed`` connects them)."""

    cure = "let them read one saved catalog: ``rayloader catalog``"


class StateMismatch(RayloaderError, ValueError):
    """A saved position belongs to another catalog, list or seed."""

    cure = "open the data set as it was when the state was saved"


class ReceiptError(RayloaderError, ValueError):
    """No receipts of a DLIO run, or no records of a sweep there, or they are malformed."""

    cure = "give the run's output folder"


class StorageError(RayloaderError, OSError):
    """A file or object could not be read; the cause is named.

    Attributes:
        key: the object's name as the user knows it.
        cause: what went wrong, in words.
        errno: the operating system's number, or 0 where there is none.
        endpoint: of object storage, where requests went; empty for files.
    """

    cure = 'see the cause; ``on_error="skip"`` leaves such files out'
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
    """The file or object has gone since it was listed."""

    cure = "list again"


class BucketNotFound(ObjectNotFound):
    """No such bucket or container at this endpoint."""

    cure = "the name; ``endpoint_url``"


class AccessDenied(StorageError, PermissionError):
    """The file or object may not be read."""

    cure = "permissions of the user who runs the rank, or of the access key"


class CredentialsRejected(AccessDenied):
    """No credentials, or the storage does not accept them."""

    cure = "``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``; ``region``; this machine's clock"


class CredentialsExpired(CredentialsRejected):
    """The session token is over."""

    cure = "new credentials, and resume from the saved state"


class NotRegularFile(StorageError):
    """The name is a directory, FIFO, socket or device."""

    cure = "take it off the list"


class Truncated(StorageError):
    """The file or object ended before the size it had when it was opened or listed."""

    cure = "somebody is writing it: wait, list again"


class Replaced(StorageError):
    """Another object than the one that was listed, or changed while it was read."""

    cure = "list again"


class Throttled(StorageError):
    """The storage asked for fewer requests for longer than ``retry_seconds``."""

    cure = "lower ``concurrency``, or fewer ranks"


class ServerFailure(StorageError):
    """The storage answered that it failed for longer than ``retry_seconds``."""

    cure = "its log; raise ``retry_seconds``"


class Unreachable(StorageError, ConnectionError):
    """No connection to the endpoint for ``retry_seconds``, or from the start."""

    cure = "``endpoint_url``; is the server up?"


class TlsFailure(Unreachable):
    """The endpoint's certificate is not trusted, or it does not speak TLS."""

    cure = "``ca_bundle``; ``http://`` or ``https://``"


class TimedOut(StorageError, TimeoutError):
    """No request for an object ended within ``request_timeout``."""

    cure = "raise ``request_timeout``; look at the server"


class RangeIgnored(StorageError):
    """The storage sends the whole object where a range was asked for."""

    cure = "``part_bytes`` of more than the objects' size"


class DirectUnsupported(StorageError):
    """The file system refuses O_DIRECT."""

    cure = '``direct="fallback"``, or ``direct=False``'


class StorageStalled(StorageError, TimeoutError):
    """No read has made progress for ``read_timeout``."""

    cure = "look at the mount; raise ``read_timeout``"


class SkipBudgetExceeded(RayloaderError):
    """More files failed than ``on_error="skip"`` allows."""

    cure = "look at ``receipt.skipped``; raise ``skip_budget_files``, ``skip_budget_share``"


class BatchTooLarge(RayloaderError, MemoryError):
    """A batch cannot fit in ``memory_bytes``."""

    cure = "the message names the figure to set; or a smaller batch"


class ReaderError(RayloaderError, RuntimeError):
    """The reader, not the storage, failed."""

    cure = "see the message"


class ReaderLost(ReaderError):
    """The reader died more than ``max_restarts`` times in a row, or does not come up."""

    cure = "the message; it says so where the kernel's out-of-memory killer struck"


class ChannelError(ReaderError):
    """Reader and trainer cannot reach or understand each other."""

    cure = '``channel="auto"``; the same version on both sides'


class ClusterError(RayloaderError, ConnectionError):
    """Ray cannot be started or used."""

    cure = "see the message"


class ClusterUnreachable(ClusterError):
    """No Ray answers at the address."""

    cure = '``ray status`` there; ``ray="private"``'


class PlacementFailed(ClusterError):
    """Ray cannot place the reader on its rank's node."""

    cure = "run ``ray start`` on that node"


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
