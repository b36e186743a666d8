"""Names of objects: ``s3://bucket/key`` and its kin, and what serves their schemes.

A key is literal: nothing is percent-decoded, no ``.`` or ``//`` is folded. An object catalog's root
is ``scheme://bucket`` or ``scheme://bucket/prefix`` without the slash that follows; or it is the
bare ``scheme://``, and then every key is a whole URI.
"""

from __future__ import annotations

from typing import NamedTuple

from rayloader.errors import CatalogError, printable

OBJECT_SCHEMES = (b"s3", b"az")
"""Served by the object storage."""
FILE_SCHEMES = (b"file", b"direct")
"""Other names for paths of this machine; ``direct`` asks for O_DIRECT."""
_GOOGLE = (
    "s3dlio, as it is distributed, has no client for Google; its S3 interface can be read: "
    "s3://BUCKET with endpoint_url='https://storage.googleapis.com' and HMAC keys"
)
_AISTORE = "AIStore has an S3 interface: s3://BUCKET with endpoint_url='http://HOST:PORT/s3'"
_UNSERVED = {
    b"gs": _GOOGLE,
    b"gcs": _GOOGLE,
    b"ais": _AISTORE,
    b"aistore": _AISTORE,
    b"s3a": "write s3://",
    b"abfss": "write az://ACCOUNT/CONTAINER/PREFIX",
}


class Location(NamedTuple):
    """Where an object root points."""

    scheme: bytes
    bucket: bytes
    """The bucket; of ``az`` the account and the container, ``account/container``."""
    prefix: bytes
    """Of all keys below: empty, or with the slash at its end."""


def scheme_of(name: bytes) -> bytes:
    """The scheme of a URI, in lower case; empty for a path.

    A scheme is what RFC 3986 calls one: ``s3://`` has it, ``./a://b`` and ``a b://c`` do not.
    """
    scheme, separator, _ = name.partition(b"://")
    spelled = scheme.replace(b"+", b"").replace(b"-", b"").replace(b".", b"")
    return scheme.lower() if separator and spelled.isalnum() and scheme[:1].isalpha() else b""


def is_object(root: bytes) -> bool:
    """Whether a catalog's root is served by the object storage."""
    return scheme_of(root) in OBJECT_SCHEMES


def location(root: bytes) -> Location:
    """The parts of an object root.

    Raises:
        CatalogError: no bucket.
    """
    scheme = scheme_of(root)
    rest = root.partition(b"://")[2]
    parts = 3 if scheme == b"az" else 2
    pieces = rest.split(b"/", parts - 1)
    if not all(pieces[: parts - 1]) or len(pieces) < parts - 1:
        wanted = "az://ACCOUNT/CONTAINER/PREFIX" if scheme == b"az" else "s3://BUCKET/PREFIX"
        raise CatalogError(f"{shown(root)}: it names no bucket; must be {wanted}")
    prefix = pieces[parts - 1] if len(pieces) == parts else b""
    if prefix and not prefix.endswith(b"/"):
        prefix += b"/"
    return Location(scheme, b"/".join(pieces[: parts - 1]), prefix)


def root_of(place: Location) -> bytes:
    """The catalog root of a location: :func:`location` backwards."""
    return (place.scheme + b"://" + place.bucket + b"/" + place.prefix)[:-1]


def joined(root: bytes, key: bytes) -> bytes:
    """The whole URI of a key below an object root."""
    return key if root.endswith(b"://") else root + b"/" + key


def local_path(name: bytes) -> bytes:
    """The path behind ``file://`` and ``direct://``; every other name as it is.

    Also behind what ``os.path.abspath`` makes of such a URI: ``/cwd/file:/data/x``.

    Raises:
        CatalogError: a URI with a host.
    """
    scheme = scheme_of(name)
    if scheme not in FILE_SCHEMES:
        return name
    path = name.partition(b"://")[2]
    if not path.startswith(b"/"):
        raise CatalogError(
            f"{shown(name)}: a relative or remote path; must be {shown(scheme)}:///absolute/path"
        )
    return path


def wants_direct(source: object) -> bool:
    """Whether a source, or the first name of a list, is ``direct://``: it asks for O_DIRECT."""
    if isinstance(source, list | tuple) and source:
        source = source[0]
    name = source.encode(errors="surrogateescape") if isinstance(source, str) else source
    return isinstance(name, bytes) and scheme_of(name) == b"direct"


def require_served(name: bytes) -> None:
    """Refuse a URI whose scheme nothing here serves, and say what to do instead.

    Raises:
        CatalogError: it is such a one.
    """
    scheme = scheme_of(name)
    if scheme and scheme not in OBJECT_SCHEMES + FILE_SCHEMES:
        known = ", ".join(f"{shown(known)}://" for known in OBJECT_SCHEMES + FILE_SCHEMES)
        what = _UNSERVED.get(scheme, f"known are paths, {known}")
        raise CatalogError(f"{shown(name)}: no storage serves {shown(scheme)}://: {what}")


def shown(name: bytes) -> str:
    """A name for messages."""
    return printable(name.decode(errors="surrogateescape"))
