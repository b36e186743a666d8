"""What object storage clients say, as typed errors: the one place that reads their words.

s3dlio raises ``RuntimeError`` with text, in two forms::

    s3 throttled: status 503, code SlowDown: S3 GET for s3://b/k failed: service error: SlowDown (m)
    GET range for s3://b/k failed: dispatch failure (… tcp connect error: Connection refused …) — …

obstore raises classes, which say less than their text: a line with the object's name, and below it
how Rust shows the error, ``inner: Status { status: 503, body: Some("<Error><Code>SlowDown…") }`` on
several lines. botocore raises classes with S3's error code inside. All end in the same table of
codes.
"""

from __future__ import annotations

import errno
import re
import socket
from typing import NamedTuple

from rayloader import errors
from rayloader.errors import StorageError
from rayloader.storage.access import Access
from rayloader.storage.http_client import Incomplete, Refused

Kind = type[StorageError]

_CODES: dict[str, tuple[Kind, str]] = {
    "NoSuchKey": (errors.ObjectNotFound, "no such object"),
    "BlobNotFound": (errors.ObjectNotFound, "no such object"),
    "NotFound": (errors.ObjectNotFound, "no such object"),
    "NoSuchBucket": (errors.BucketNotFound, "no such bucket"),
    "ContainerNotFound": (errors.BucketNotFound, "no such container"),
    "AccessDenied": (errors.AccessDenied, "access denied"),
    "AllAccessDisabled": (errors.AccessDenied, "access denied"),
    "InvalidObjectState": (errors.AccessDenied, "the object is archived: restore it first"),
    "InvalidAccessKeyId": (errors.CredentialsRejected, "the access key is unknown"),
    "SignatureDoesNotMatch": (errors.CredentialsRejected, "the secret key is wrong"),
    "InvalidToken": (errors.CredentialsRejected, "the session token is wrong"),
    "AuthorizationHeaderMalformed": (
        errors.CredentialsRejected,
        "signed for another region: see the option region",
    ),
    "AuthenticationFailed": (errors.CredentialsRejected, "the credentials are wrong"),
    "RequestTimeTooSkewed": (errors.CredentialsRejected, "this machine's clock is wrong"),
    "ExpiredToken": (errors.CredentialsExpired, "the credentials have expired"),
    "ExpiredTokenException": (errors.CredentialsExpired, "the credentials have expired"),
    "TokenRefreshRequired": (errors.CredentialsExpired, "the credentials have expired"),
    "RequestExpired": (errors.CredentialsExpired, "the credentials have expired"),
    "SlowDown": (errors.Throttled, "throttled"),
    "ServerBusy": (errors.Throttled, "throttled"),
    "Throttling": (errors.Throttled, "throttled"),
    "ThrottlingException": (errors.Throttled, "throttled"),
    "RequestLimitExceeded": (errors.Throttled, "throttled"),
    "TooManyRequests": (errors.Throttled, "throttled"),
    "InvalidRange": (errors.Truncated, "ended before its listed size"),
    "PreconditionFailed": (errors.Replaced, "replaced while it was read"),
    "RequestTimeout": (errors.TimedOut, "the server got no request in time"),
}
"""S3's and Azure's error codes."""

_STATUSES: dict[int, tuple[Kind, str]] = {
    401: (errors.CredentialsRejected, "the credentials are wrong"),
    403: (errors.AccessDenied, "access denied"),
    404: (errors.ObjectNotFound, "no such object"),
    408: (errors.TimedOut, "the server got no request in time"),
    412: (errors.Replaced, "replaced while it was read"),
    416: (errors.Truncated, "ended before its listed size"),
    429: (errors.Throttled, "throttled"),
    503: (errors.Throttled, "throttled"),
}
"""HTTP's, where there is no code that is known."""

_TRANSPORT: tuple[tuple[re.Pattern[str], Kind, str], ...] = (
    (re.compile(r"certificate|corrupt message|handshake|tls alert", re.I), errors.TlsFailure,
     "no trusted connection: see the option ca_bundle"),
    (re.compile(r"CA bundle"), errors.TlsFailure, "the ca_bundle cannot be used"),
    (re.compile(r"connection refused", re.I), errors.Unreachable, "connection refused"),
    (re.compile(r"dns error|name resolution|lookup", re.I), errors.Unreachable, "no such host"),
    (re.compile(r"minimum throughput"), errors.TimedOut, "the server stopped sending"),
    (re.compile(r"\bTimedOut\b"), errors.TimedOut, "no answer in time"),
    (re.compile(r"request timed out|operation timed out"), errors.TimedOut, "no answer in time"),
    (re.compile(r"before message length|partially received|\bbody\b", re.I), errors.Truncated,
     "the connection ended before the object did"),
    (re.compile(r"connection closed|reset|SendRequest|unreachable|I/O error|broken pipe", re.I),
     errors.Unreachable, "the connection broke"),
)  # fmt: skip
"""What happened on the way, by s3dlio's or obstore's words; the first that is found."""

_URL = re.compile(r"for url \(\S*\)")
_STATUS = re.compile(r"\bstatus (\d{3})\b|\bHTTP (\d{3})\b")
_CODE = re.compile(r"\bcode (\w+)|service error: (\w+)")
_PASSES = (errors.Throttled, errors.ServerFailure, errors.Unreachable, errors.TimedOut)


class Failure(NamedTuple):
    """One failed request."""

    error: StorageError
    passes: bool
    """It may go well when it is sent again."""


def of_s3dlio(key: str, uri: str, error: BaseException, access: Access) -> Failure:
    """What a failed call of s3dlio means.

    Args:
        key: the object's name as the user knows it.
        uri: as it was given to s3dlio; its words are not taken for s3dlio's.
        error: what the call raised.
        access: where it was sent, and what must not be repeated.
    """
    words = str(error)
    if words == "Missing AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY":
        return Failure(no_credentials(key, access), passes=False)
    # Advice comes behind a dash, and is about s3dlio's own variables.
    words = _URL.sub("", words.replace(uri, "it")).split(" — ")[0]
    status = _first(_STATUS, str(error).replace(uri, "it"))
    code = _first(_CODE, words)
    return _failure(key, code, int(status or 0), words, access)


def of_obstore(key: str, error: BaseException, access: Access) -> Failure:
    """What a failed call of obstore means.

    Args:
        key: the object's name as the user knows it.
        error: what the call raised.
        access: where it was sent, and what must not be repeated.
    """
    first, _, shown = str(error).partition("\n\nDebug source:\n")
    if _NOT_PARTIAL.search(shown):
        words = "the server sent the whole object where a range was asked for"
        return Failure(made(errors.RangeIgnored, key, words, access), passes=False)
    # The object's name is in lines before this one, or quoted within a line.
    inner = _INNER.search(shown)
    shown = shown[inner.end() :] if inner else shown
    if status := _STATUS_LINE.match(shown):
        code = _first(_CODE_ELEMENT, shown)
        return _failure(key, code, int(status[1]), "", access)
    if inner is None and not _HTTP.search(shown):
        return Failure(made(StorageError, key, access.blotted(first)[:_DETAIL], access), False)
    return _failure(key, "", 0, " ".join(shown.split()), access)


def of_http(key: str, error: BaseException, access: Access) -> Failure:
    """What a failed GET of rayloader's own client means.

    Args:
        key: the object's name as the user knows it.
        error: what it raised; not ``Unspoken``.
        access: where it was sent.
    """
    if isinstance(error, Refused):
        return _failure(key, error.code, error.status, "", access)
    if isinstance(error, Incomplete):
        words = "the connection ended before the object did"
        return Failure(made(errors.Truncated, key, words, access), passes=True)
    if not isinstance(error, OSError):
        raise error
    kind, cause = errors.Unreachable, "the connection broke"
    if isinstance(error, socket.gaierror):
        cause = "no such host"
    elif isinstance(error, ConnectionRefusedError):
        cause = "connection refused"
    elif isinstance(error, TimeoutError):
        cause = "nobody answers there"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        cause = "no descriptor is free for a connection"
    return Failure(made(kind, key, cause, access), passes=True)


_NOT_PARTIAL = re.compile(r"^ *source: NotPartial\b", re.M)
_INNER = re.compile(r"^ *inner: ", re.M)
_HTTP = re.compile(r"^ *source: HttpError\b", re.M)
_STATUS_LINE = re.compile(r"Status \{\s*status: (\d{3})\b")
_CODE_ELEMENT = re.compile(r"<Code>(\w+)</Code>")


def of_botocore(key: str, error: Exception, access: Access) -> StorageError:
    """What botocore's error means: one of S3's codes, or what became of the request."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(response.get("Error", {}).get("Code", ""))
        return _failure(key, "" if code == str(status) else code, status, "", access).error
    for name, (kind, cause) in _BOTOCORE.items():
        if name in {base.__name__ for base in type(error).__mro__}:
            return made(kind, key, cause, access)
    words = access.blotted(f"{type(error).__name__}: {error}")
    return made(StorageError, key, words[:_DETAIL], access)


_BOTOCORE: dict[str, tuple[Kind, str]] = {
    "SSLError": (errors.TlsFailure, "no trusted connection: see the option ca_bundle"),
    "EndpointConnectionError": (errors.Unreachable, "nobody answers there"),
    "ConnectTimeoutError": (errors.Unreachable, "nobody answers there"),
    "ReadTimeoutError": (errors.TimedOut, "no answer in time"),
    "ConnectionClosedError": (errors.Unreachable, "the connection broke"),
    "ConnectionError": (errors.Unreachable, "the connection broke"),
    "HTTPClientError": (errors.Unreachable, "the connection broke"),
}
"""Its classes, by name: it is not imported for an error that it has not raised."""


def no_credentials(key: str, access: Access) -> StorageError:
    """There is nothing to sign requests with."""
    return made(
        errors.CredentialsRejected,
        key,
        "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        access,
    )


def made(kind: Kind, key: str, cause: str, access: Access) -> StorageError:
    """An error that names its endpoint."""
    error = kind(key, f"{cause} ({access.destination})")
    error.endpoint = access.destination
    return error


def _failure(key: str, code: str, status: int, words: str, access: Access) -> Failure:
    said = " ".join(part for part in (str(status or ""), code) if part and part != "unknown")
    if code in _CODES:
        kind, cause = _CODES[code]
    elif status in _STATUSES and not (status == 503 and code not in ("", "unknown")):
        kind, cause = _STATUSES[status]
    elif status >= 500:
        kind, cause = errors.ServerFailure, "the server failed"
    elif status:
        kind, cause = StorageError, "the server refused"
    else:
        kind, cause, said = _on_the_way(access.blotted(words))
    passes = issubclass(kind, _PASSES) and not issubclass(kind, errors.TlsFailure)
    if kind is errors.Truncated and not status and code != "InvalidRange":
        passes = True
    return Failure(made(kind, key, f"{cause}: {said}" if said else cause, access), passes)


def _on_the_way(words: str) -> tuple[Kind, str, str]:
    """What became of a request that got no answer, or half of one."""
    detail = words.rpartition("failed: ")[2][:_DETAIL]
    for pattern, kind, cause in _TRANSPORT:
        if pattern.search(words):
            shown = detail if kind is errors.TlsFailure else ""
            return kind, cause, _innermost(shown)
    return StorageError, "the request failed", detail


_DETAIL = 300
"""Of the client's own words, at most so much is repeated [characters]."""


def _innermost(words: str) -> str:
    """The last link of a chain of causes: what the TLS library says."""
    said = words.rpartition("client error (Connect): ")[2].rpartition(" error: ")[2]
    return said.rstrip("), }").replace("( ", " ")


def _first(pattern: re.Pattern[str], words: str) -> str:
    match = pattern.search(words)
    return next((group for group in match.groups() if group), "") if match else ""
