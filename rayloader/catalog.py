"""What exists: the keys of all entries, in order, with their sizes where known.

A catalog is one Arrow record batch. Saved, it is an Arrow IPC file that is memory-mapped when it
is loaded; shared between the processes of a node, it is a memfd with the same contents. In
both cases no process holds a copy of its own.

Keys are bytes (``large_binary``) inside and ``str`` by :func:`os.fsdecode` outside. They are
relative to ``root``; an absolute key stays what it is, as ``openat`` has it. Of objects, the root
is ``s3://bucket/prefix``, or ``s3://`` when the keys are whole URIs.

One million keys of 45 bytes, on a 2-core machine: ``load`` and ``from_fd`` take 1 ms, look at
8 MB of shared pages and make none private; ``blob_at`` takes 10 µs for 24 keys and 20 µs for 256,
``keys_at`` 9 and 25 µs, ``names_at`` 11 and 40 µs; ``digest`` 60 ms, once. A directory is listed at
1.3 µs per file and sorted at 1 µs per file with 136 MB at most, a Python list taken in 0.15 s.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import mmap
import os
import secrets
import stat as stats
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayloader.config import STATS_AT_ONCE
from rayloader.errors import CatalogError, EmptyCatalog, OptionError, printable
from rayloader.storage.access import Access
from rayloader.storage.listing import PosixLister, has_magic, split_glob
from rayloader.storage.uri import (
    FILE_SCHEMES,
    OBJECT_SCHEMES,
    Location,
    is_object,
    local_path,
    location,
    require_served,
    root_of,
    scheme_of,
)

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Files: TypeAlias = Sequence[Path] | pa.Array | pa.ChunkedArray
Source: TypeAlias = Union[Path, Files, "Catalog"]
Indices = npt.NDArray[np.int64]
Progress = Callable[[int], None]

SUFFIX = ".arrow"
_SAVED = (b".arrow", b".parquet")
"""Ends of names that may be saved catalogs, where looking costs a request."""
_KEY, _SIZE, _CHECKSUM = "key", "size", "checksum"
_ROOT, _DIGEST = b"rayloader.root", b"rayloader.digest"
_ARROW_MAGIC, _PARQUET_MAGIC = b"ARROW1", b"PAR1"
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
_CHUNK = 1 << 16
"""Keys turned into Arrow at once [keys]: bounds the Python objects alive while listing."""
_STAT_ENTRIES = 256
"""Files that one thread looks up in one go, at most [files]."""
_TICK_SECONDS, _TICK_ENTRIES = 0.1, 64
_SLACK = 4096
"""Bytes beyond their own that keys may carry along [bytes]."""
_ACCEPTED = (
    "a directory, a glob, a list of paths, a Catalog or a saved catalog (.arrow, .parquet), "
    "or s3://BUCKET/PREFIX"
)


class Catalog:
    """The entries that exist. Immutable.

    Args:
        root: the directory that relative keys are relative to, or an object root.
        keys: a pyarrow array of strings or binary without nulls; compacted if it is a slice.
        sizes: int64 [n], -1 where unknown [bytes].
        checksums: a pyarrow array [n], kept as it is.
        extra: further schema metadata to save along.

    Raises:
        CatalogError: a key that cannot be a file name, or columns of different lengths.

    Attributes:
        root: see above.
        keys: ``pyarrow.LargeBinaryArray`` [n].
        sizes: int64 [n], or ``None`` when no size is known [bytes].
        checksums: pyarrow array [n] or ``None``.
        extra: schema metadata other than rayloader's own.
    """

    def __init__(
        self,
        root: bytes,
        keys: pa.Array,
        sizes: npt.NDArray[np.int64] | None = None,
        checksums: pa.Array | None = None,
        extra: dict[bytes, bytes] | None = None,
    ) -> None:
        self.root = root
        self.keys = _compact(keys)
        self.sizes = sizes
        self.checksums = checksums
        self.extra = dict(extra or {})
        self.metadata_ops = 0
        """Made by this process to list and stat: directories opened and read, files looked up."""
        self._file: _Descriptor | None = None
        for name, column in ((_SIZE, sizes), (_CHECKSUM, checksums)):
            if column is not None and len(column) != len(self.keys):
                raise CatalogError(
                    f"{len(self.keys)} keys and {len(column)} values in {name!r}: must be as many"
                )

    @classmethod
    def from_source(
        cls,
        source: Source,
        *,
        stat: bool = False,
        progress: Progress | None = None,
        access: Access | None = None,
        etags: bool = False,
    ) -> Catalog:
        """The catalog of whatever a user names.

        Args:
            source: a directory or ``s3://bucket/prefix`` (all files or objects below it), a glob
                (``**`` for any depth; it names files, not directories), a list of paths or URIs
                (as :meth:`of_files`), a saved catalog, or a Catalog, which is returned as it is.
                What is listed is sorted bytewise.
            stat: learn the sizes of files that are not known, 64 at a time. A bucket's listing
                has them anyway.
            progress: called with the number of entries so far, at most ten times a second and
                once at the end of listing and of stat.
            access: where a bucket is and who asks; ``None``: as the environment says.
            etags: of a bucket that is listed, keep the ETags as checksums.

        Raises:
            CatalogError: there is no such path, or it is none of the above.
            EmptyCatalog: it exists and holds nothing.
            StorageError: a bucket cannot be listed; the class says why.
        """
        if isinstance(source, cls):
            catalog = source
        elif isinstance(source, str | bytes | os.PathLike):
            catalog = cls._of_path(os.fsencode(source), progress, access, etags)
        elif isinstance(source, Sequence | np.ndarray | pa.Array | pa.ChunkedArray):
            catalog = cls.of_files(source)
        else:
            raise OptionError(f"a source of type {type(source).__name__}: must be {_ACCEPTED}")
        if not len(catalog):
            raise EmptyCatalog(f"nothing to read in {_described(source)}")
        if stat and catalog.sizes is None and not is_object(catalog.root):
            return catalog.with_sizes(progress)
        return catalog

    @classmethod
    def of_files(
        cls,
        files: Files,
        root: Path | None = None,
        sizes: npt.NDArray[np.int64] | None = None,
        checksums: pa.Array | None = None,
    ) -> Catalog:
        """The catalog of an explicit list, in its order, names as given, duplicates kept.

        Args:
            files: a sequence of str, bytes or path-like, or a pyarrow array of strings or binary:
                paths, or URIs of one scheme. ``file://`` and ``direct://`` become paths.
            root: the directory or object root of relative names; ``None``: the current directory,
                or with URIs none.
            sizes: int64 [n], -1 where unknown [bytes]. With them an object costs one request, and
                without them two.
            checksums: a pyarrow array [n], kept as it is.

        Raises:
            CatalogError: a name that is empty or holds a NUL, URIs beside paths, or of a scheme
                that nothing serves.
        """
        if isinstance(files, str | bytes | os.PathLike):
            raise OptionError(f"files={files!r}: must be a list of paths, not one path")
        keys = _key_array(files)
        if root is None:
            keys, found = _located(keys)
        else:
            found = os.fsencode(root)
        return cls(_absolute(found), keys, sizes, checksums)

    @classmethod
    def load(cls, path: Path, root: Path | None = None) -> Catalog:
        """Open a saved catalog: an Arrow IPC file is memory-mapped, Parquet is converted.

        Files from elsewhere need a column ``key``; ``size`` and ``checksum`` are optional.

        Args:
            path: the file.
            root: the directory of relative keys; ``None``: the one that was saved, else the one
                that holds the file.

        Raises:
            CatalogError: no such file, or not a catalog; it names the file and the cause.
        """
        name = os.fsencode(path)
        try:
            descriptor = _Descriptor(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            raise CatalogError(f"{_shown(name)}: {_reason(error)}") from error
        beside = _absolute(os.path.dirname(name) or b".")
        catalog = cls._of_descriptor(descriptor, _shown(name), beside)
        if root is not None:
            catalog = cls(
                _absolute(os.fsencode(root)),
                catalog.keys,
                catalog.sizes,
                catalog.checksums,
                catalog.extra,
            )
        return catalog

    @classmethod
    def from_fd(cls, fd: int) -> Catalog:
        """Map the catalog behind a descriptor that :meth:`to_fd` gave. The caller keeps ``fd``.

        Raises:
            CatalogError: it holds no catalog.
        """
        try:
            descriptor = _Descriptor(os.dup(fd))
        except OSError as error:
            raise CatalogError(f"catalog in descriptor {fd}: {_reason(error)}") from error
        return cls._of_descriptor(descriptor, f"catalog in descriptor {fd}", b"/")

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<Catalog of {len(self)} entries in {os.fsdecode(self.root)!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, self.keys, self.sizes, self.checksums, self.extra)

    @functools.cached_property
    def digest(self) -> str:
        """Names the keys and their order: BLAKE2b over all lengths, then all bytes. 32 digits."""
        state = hashlib.blake2b(digest_size=16)
        offsets, values = _views(self.keys)
        for low in range(0, len(self), _CHUNK):
            lengths = np.diff(offsets[low : low + _CHUNK + 1])
            state.update(lengths.astype("<i8", copy=False).tobytes())
        state.update(values[offsets[0] : offsets[-1]].data)
        return state.hexdigest()

    @property
    def knows_digest(self) -> bool:
        """True where :attr:`digest` need not be computed any more."""
        return "digest" in self.__dict__

    def with_digest(self, digest: str) -> Catalog:
        """This catalog, which need not compute its digest: its owner in this run has done so."""
        self.__dict__["digest"] = digest
        return self

    @property
    def total_bytes(self) -> int | None:
        """Sum of the known sizes; ``None`` when no size is known [bytes]."""
        return None if self.sizes is None else int(np.maximum(self.sizes, 0).sum())

    def key(self, index: int) -> str:
        """The name of one entry.

        Raises:
            IndexError: unless 0 <= index < len.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"entry {index} is not in a catalog of {len(self)}")
        return os.fsdecode(self.keys[index].as_py())

    def keys_at(self, indices: Indices) -> list[bytes]:
        """The keys of some entries, int64 [n], in that order.

        Raises:
            IndexError: for an index outside the catalog.
        """
        keys: list[bytes] = self.keys.take(_int64s(indices)).to_pylist()
        return keys

    def names_at(self, indices: Indices) -> list[str]:
        """As :meth:`keys_at`, decoded."""
        return [key.decode(_ENCODING, _ERRORS) for key in self.keys_at(indices)]

    def blob_at(self, indices: Indices) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The keys of some entries, int64 [n], one after the other.

        Returns:
            All bytes, and int64 offsets [n + 1]: key i is ``blob[offsets[i]:offsets[i + 1]]``.

        Raises:
            IndexError: for an index outside the catalog.
        """
        offsets, values = _views(self.keys.take(_int64s(indices)))
        return values[: offsets[-1]].tobytes(), offsets

    def sized_by(self, listing: Catalog) -> Catalog:
        """This catalog with the sizes of those of its entries that another one has too.

        For an explicit list of objects whose names and sizes a listing has: with its size known,
        an object costs one request.

        Args:
            listing: one with sizes; its names are looked up as whole paths or URIs.
        """
        if listing.sizes is None or not len(listing) or self.sizes is not None:
            return self
        keys = self.keys
        if self.root != listing.root:
            if self.root not in (b"/", listing.root.partition(b"://")[0] + b"://"):
                return self
            above = listing.root.rstrip(b"/") + b"/"
            below = pc.starts_with(keys, pattern=above)
            relative = pc.replace_substring(keys, above, b"", max_replacements=1)
            keys = pc.if_else(below, relative, pa.scalar(None, keys.type))
        places = pc.fill_null(pc.index_in(keys, value_set=listing.keys, skip_nulls=True), -1)
        found = np.frombuffer(places.buffers()[1], np.int32)[: len(keys)]
        sizes = np.where(found >= 0, listing.sizes[found], -1)
        return Catalog(self.root, self.keys, sizes, self.checksums, self.extra)

    def with_sizes(self, progress: Progress | None = None) -> Catalog:
        """This catalog with the size of every regular file that can be looked up, -1 otherwise."""
        sizes = _look_up_sizes(self, Ticker(progress))
        sized = Catalog(self.root, self.keys, sizes, self.checksums, self.extra)
        sized.metadata_ops = self.metadata_ops + len(self)
        return sized

    def save(self, path: Path) -> None:
        """Write an Arrow IPC file, uncompressed, under a temporary name that is then changed.

        Raises:
            CatalogError: it cannot be written.
        """
        name = os.fsencode(path)
        directory = os.path.dirname(name) or b"."
        temporary = os.path.join(directory, f".rayloader-{secrets.token_hex(8)}".encode())
        try:
            try:
                with open(temporary, "xb") as file:
                    self._write(file, {})
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, name)
            except BaseException:
                if os.path.lexists(temporary):
                    os.unlink(temporary)
                raise
        except OSError as error:
            raise CatalogError(f"{_shown(name)}: cannot be saved: {_reason(error)}") from error

    def dumps(self) -> bytes:
        """What :meth:`save` writes, as bytes."""
        file = io.BytesIO()
        self._write(file, {})
        return file.getvalue()

    @classmethod
    def loads(cls, data: bytes, name: str, beside: bytes) -> Catalog:
        """A catalog from the bytes of a saved one.

        Args:
            data: of an Arrow IPC file or Parquet.
            name: for messages.
            beside: what relative keys are relative to, if the catalog does not say.

        Raises:
            CatalogError: it is none.
        """
        descriptor = _Descriptor(os.memfd_create("rayloader-catalog", os.MFD_CLOEXEC))
        with open(os.dup(descriptor.fd), "wb") as file:
            file.write(data)
        return cls._of_descriptor(descriptor, name, beside)

    def to_fd(self) -> int:
        """A new descriptor of this catalog, for :meth:`from_fd` in any process of this node.

        It is the saved file that this catalog maps, or a sealed memfd made at the first call and
        kept as long as this object. The caller closes what it gets.
        """
        if self._file is None:
            fd = os.memfd_create("rayloader-catalog", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            descriptor = _Descriptor(fd)
            with open(os.dup(fd), "wb") as file:
                self._write(file, {_DIGEST: self.digest.encode()})
            _seal(fd)
            self._file = descriptor
        return os.dup(self._file.fd)

    def _write(self, file: BinaryIO, more: dict[bytes, bytes]) -> None:
        columns = [self.keys]
        fields = [pa.field(_KEY, pa.large_binary(), nullable=False)]
        if self.sizes is not None:
            columns.append(_int64s(self.sizes))
            fields.append(pa.field(_SIZE, pa.int64(), nullable=False))
        if self.checksums is not None:
            columns.append(self.checksums)
            fields.append(pa.field(_CHECKSUM, self.checksums.type))
        schema = pa.schema(fields, metadata={**self.extra, _ROOT: self.root, **more})
        with pa.ipc.new_file(file, schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))

    @classmethod
    def _of_path(
        cls, path: bytes, progress: Progress | None, access: Access | None, etags: bool
    ) -> Catalog:
        scheme = scheme_of(path)
        if scheme in OBJECT_SCHEMES:
            return cls._of_objects(path, access, etags, Ticker(progress))
        if scheme in FILE_SCHEMES:
            path = local_path(path)
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError) as error:
            if has_magic(path):
                return cls._listed(*split_glob(path), Ticker(progress))
            require_served(path)
            raise CatalogError(f"{_shown(path)}: no such file or directory") from error
        except (OSError, ValueError) as error:
            raise CatalogError(f"{_shown(path)}: {_reason(error)}") from error
        if stats.S_ISDIR(mode):
            return cls._listed(path, None, Ticker(progress))
        if not stats.S_ISREG(mode):
            raise CatalogError(f"{_shown(path)}: a special file; give {_ACCEPTED}")
        try:
            return cls.load(path)
        except CatalogError as error:
            if isinstance(error.__cause__, PermissionError):
                raise  # what it is cannot be known
            raise CatalogError(f"{error}; give {_ACCEPTED}") from error

    @classmethod
    def _listed(cls, root: bytes, pattern: bytes | None, ticker: Ticker) -> Catalog:
        lister = PosixLister(pattern)
        catalog = cls(_absolute(root), *_sorted_entries(lister.list(root), ticker))
        catalog.metadata_ops = lister.metadata_ops
        return catalog

    @classmethod
    def _of_objects(cls, uri: bytes, access: Access | None, etags: bool, ticker: Ticker) -> Catalog:
        """What lies below a prefix; if that is nothing and the URI a glob, what matches it."""
        place = location(uri)
        access = access if access is not None else Access.found(os.environ)
        if uri.endswith(_SAVED) and (saved := cls._saved_object(uri, access)) is not None:
            return saved
        catalog = cls._below(place, None, access, etags, ticker)
        if not len(catalog) and has_magic(place.prefix):
            directory, pattern = split_glob(place.prefix[:-1])
            directory = b"" if directory == b"." else directory
            above = place._replace(prefix=directory)
            globbed = cls._below(above, pattern, access, etags, ticker)
            globbed.metadata_ops += catalog.metadata_ops
            return globbed
        return catalog

    @classmethod
    def _saved_object(cls, uri: bytes, access: Access) -> Catalog | None:
        """The catalog saved as an object of this very name; ``None`` where there is none."""
        from rayloader.storage.bucket import Bucket

        parent, _, name = uri.rpartition(b"/")
        if scheme_of(uri) != b"s3" or location(parent + b"/").bucket == b"":
            return None
        data = Bucket(parent, access).get(os.fsdecode(name))
        return None if data is None else cls.loads(data, _shown(uri), parent)

    @classmethod
    def _below(
        cls, place: Location, pattern: bytes | None, access: Access, etags: bool, ticker: Ticker
    ) -> Catalog:
        from rayloader.storage.object_listing import lister_of

        root, lister = root_of(place), lister_of(place, access, pattern)
        if not etags:
            catalog = cls(root, *_sorted_entries(lister.list(root), ticker))
        else:
            catalog = _with_etags(root, list(lister.entries(root)), ticker)
        catalog.metadata_ops = lister.metadata_ops
        return catalog

    @classmethod
    def _of_descriptor(cls, descriptor: _Descriptor, name: str, beside: bytes) -> Catalog:
        try:
            buffer = _mapped(descriptor.fd)
            table = _read_table(buffer)
            metadata = dict(table.schema.metadata or {})
            foreign = _ROOT not in metadata
            root, digest = metadata.pop(_ROOT, beside), metadata.pop(_DIGEST, None)
            keys, sizes, checksums = _columns(table)
            if foreign:
                _check_names(keys)
            catalog = cls(root, keys, sizes, checksums, metadata)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise CatalogError(f"{name}: not a catalog: {_reason(error)}") from error
        if not foreign and _lies_in(catalog.keys, buffer):
            catalog._file = descriptor
        return catalog if digest is None else catalog.with_digest(digest.decode("ascii"))


def root_of_source(source: Source) -> bytes:
    """Where a source's entries will be, as far as that can be told without listing anything."""
    if isinstance(source, Catalog):
        return source.root
    if isinstance(source, str | bytes | os.PathLike):
        name = os.fsencode(source)
        if scheme_of(name) in OBJECT_SCHEMES or not os.path.isfile(name):
            return name
        try:
            return Catalog.load(name).root
        except CatalogError:  # from_source will say so
            return name
    return os.fsencode(source[0]) if len(source) and isinstance(source[0], str | bytes) else b""


class _Descriptor:
    """An open file that is closed with the last reference."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)


class Ticker:
    """Reports a count now and then."""

    def __init__(self, report: Progress | None) -> None:
        self._report = report
        self._due = time.monotonic()

    def __call__(self, count: int) -> None:
        """Report if the last report is old enough."""
        if self._report is not None and time.monotonic() >= self._due:
            self.end(count)
            self._due = time.monotonic() + _TICK_SECONDS

    def end(self, count: int) -> None:
        """Report for certain."""
        if self._report is not None:
            self._report(count)


def _key_array(files: Files) -> pa.LargeBinaryArray:
    """Names of any kind as large_binary, checked."""
    if not isinstance(files, pa.Array | pa.ChunkedArray):
        files = _encoded(list(files))
    keys = _large_binary(files)
    _check_names(keys)
    return keys


def _encoded(files: list[Any]) -> pa.Array:
    kinds = set(map(type, files))
    if kinds == {bytes}:
        return pa.array(files, pa.large_binary())
    if kinds == {str} and _ENCODING == "utf-8":
        try:
            return pa.array(files, pa.large_string())
        except UnicodeEncodeError:
            pass  # a name that is not UTF-8, held as surrogates
    try:
        return pa.array([os.fsencode(file) for file in files], pa.large_binary())
    except TypeError as error:
        raise OptionError(f"a list of paths: {error}") from error


def _large_binary(keys: pa.Array | pa.ChunkedArray) -> pa.LargeBinaryArray:
    """Any array of strings or binary as one large_binary array without nulls."""
    if keys.null_count:
        raise CatalogError(f"{keys.null_count} names are null")
    if keys.type != pa.large_binary():
        try:
            keys = keys.cast(pa.large_binary())
        except pa.ArrowException as error:
            raise CatalogError(f"names of type {keys.type}: must be strings or binary") from error
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _compact(keys: pa.Array | pa.ChunkedArray) -> pa.LargeBinaryArray:
    """The same keys in buffers that hold nothing else: a slice would travel with its whole."""
    keys = _large_binary(keys)
    offsets, values = _views(keys)
    sizes = [buffer.size for buffer in keys.buffers()[1:] if buffer is not None]
    if keys.offset == 0 and sum(sizes) <= offsets.nbytes + int(offsets[-1]) + _SLACK:
        return keys
    own = values[offsets[0] : offsets[-1]].copy()
    buffers = [None, pa.py_buffer(offsets - offsets[0]), pa.py_buffer(own)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(keys), buffers)


def _views(keys: pa.LargeBinaryArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets [n + 1] and bytes of a large_binary array, without copying."""
    _, offsets, values = keys.buffers()
    if len(keys) == 0 or values is None or values.size == 0:
        return np.zeros(len(keys) + 1, np.int64), np.zeros(0, np.uint8)
    view = np.frombuffer(offsets, np.int64, len(keys) + 1, 8 * keys.offset)
    return view, np.frombuffer(values, np.uint8)


def _check_names(keys: pa.LargeBinaryArray) -> None:
    """Raise for a key that no file can have."""
    offsets, values = _views(keys)
    values = values[offsets[0] : offsets[-1]]
    if len(keys) and int(np.diff(offsets).min()) == 0:
        raise CatalogError(f"name {int(np.diff(offsets).argmin())} of the list is empty")
    if values.size and int(values.min()) == 0:
        place = int(offsets[0]) + int(values.argmin())
        entry = int(np.searchsorted(offsets, place, side="right")) - 1
        raise CatalogError(f"{_shown(keys[entry].as_py())}: a file name cannot hold a NUL")


def _located(keys: pa.LargeBinaryArray) -> tuple[pa.LargeBinaryArray, bytes]:
    """Names given without a root, and the root they have: of URIs the scheme alone.

    Raises:
        CatalogError: URIs beside paths, or of a scheme that nothing serves.
    """
    first: bytes = keys[0].as_py() if len(keys) else b""
    scheme = scheme_of(first)
    if scheme in FILE_SCHEMES:
        return pa.array([local_path(key) for key in keys.to_pylist()], pa.large_binary()), b"."
    if scheme not in OBJECT_SCHEMES:
        require_served(first)
        return keys, b"."
    root = scheme + b"://"
    fits = pc.starts_with(keys, pattern=root)
    if not pc.all(fits).as_py():
        other: bytes = keys.filter(pc.invert(fits))[0].as_py()
        raise CatalogError(
            f"{_shown(other)}: the list begins with {_shown(first)}, and all must be {_shown(root)}"
        )
    return keys, root


def _with_etags(root: bytes, entries: list[tuple[bytes, int, bytes]], ticker: Ticker) -> Catalog:
    """The catalog of a listing that keeps its ETags: larger, and made in Python."""
    entries.sort()
    ticker.end(len(entries))
    keys, sizes, etags = zip(*entries, strict=True) if entries else ((), (), ())
    return Catalog(
        root,
        pa.array(keys, pa.large_binary()),
        np.array(sizes, np.int64),
        pa.array(etags, pa.large_binary()),
    )


def _sorted_entries(
    listing: Iterator[tuple[bytes, int]], ticker: Ticker
) -> tuple[pa.LargeBinaryArray, npt.NDArray[np.int64] | None]:
    """The keys of a listing in bytewise order, and their sizes if it has any [bytes]."""
    chunks, names, sizes, count = [pa.array([], pa.large_binary())], list[bytes](), array("q"), 0
    for count, (name, size) in enumerate(listing, 1):
        names.append(name)
        sizes.append(size)
        if len(names) == _CHUNK:
            chunks.append(pa.array(names, pa.large_binary()))
            names.clear()
        if count % _TICK_ENTRIES == 0:
            ticker(count)
    chunks.append(pa.array(names, pa.large_binary()))
    ticker.end(count)
    keys = pa.concat_arrays(chunks)
    order = pc.sort_indices(keys)
    known = np.frombuffer(sizes, np.int64) if len(sizes) else np.empty(0, np.int64)
    if known.max(initial=-1) < 0:
        return keys.take(order), None
    return keys.take(order), known[np.frombuffer(order.buffers()[1], np.uint64)[: len(known)]]


def _look_up_sizes(catalog: Catalog, ticker: Ticker) -> npt.NDArray[np.int64]:
    """int64 [n], the size of each regular file, -1 for all else [bytes]."""
    count, done = len(catalog), 0
    sizes = np.full(count, -1, np.int64)
    step = max(1, min(_STAT_ENTRIES, count // (4 * STATS_AT_ONCE)))
    try:
        root = _Descriptor(os.open(catalog.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        raise CatalogError(f"{_shown(catalog.root)}: {_reason(error)}") from error

    def look_up(low: int) -> int:
        indices = np.arange(low, min(low + step, count))
        for index, key in enumerate(catalog.keys_at(indices), low):
            sizes[index] = _size(root.fd, key)
        return len(indices)

    with ThreadPoolExecutor(STATS_AT_ONCE, "rayloader-stat") as pool:
        for looked_up in pool.map(look_up, range(0, count, step)):
            done += looked_up
            ticker(done)
    ticker.end(done)
    return sizes


def _size(root: int, key: bytes) -> int:
    try:
        status = os.stat(key, dir_fd=root)
    except (OSError, ValueError):
        return -1  # reading it will say why
    return status.st_size if stats.S_ISREG(status.st_mode) else -1


def _mapped(fd: int) -> pa.Buffer:
    """The contents of a regular file, mapped read-only."""
    status = os.fstat(fd)
    if not stats.S_ISREG(status.st_mode):
        raise CatalogError("it is not a regular file")
    if status.st_size == 0:
        raise CatalogError("the file is empty")
    # Private, because a sealed memfd refuses a shared mapping; the pages are shared all the same.
    return pa.py_buffer(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))


def _read_table(buffer: pa.Buffer) -> pa.RecordBatch | pa.Table:
    magic = buffer[: len(_ARROW_MAGIC)].to_pybytes()
    if magic == _ARROW_MAGIC:
        reader = pa.ipc.open_file(buffer)
        return reader.get_batch(0) if reader.num_record_batches == 1 else reader.read_all()
    if magic.startswith(_PARQUET_MAGIC):
        import pyarrow.parquet as pq

        file = pq.ParquetFile(pa.BufferReader(buffer))
        wanted = [name for name in file.schema_arrow.names if name in (_KEY, _SIZE, _CHECKSUM)]
        return file.read(columns=wanted)
    raise CatalogError("neither an Arrow IPC file nor Parquet")


def _columns(
    table: pa.RecordBatch | pa.Table,
) -> tuple[pa.LargeBinaryArray, npt.NDArray[np.int64] | None, pa.Array | None]:
    """Keys, sizes and checksums, checked so far that looking them up is safe."""
    names = table.schema.names
    if names.count(_KEY) != 1:
        raise CatalogError(f"it has no column {_KEY!r}; its columns are {names}")
    keys = _large_binary(table.column(_KEY))
    keys.validate(full=True)
    sizes = checksums = None
    if names.count(_SIZE) == 1:
        column = table.column(_SIZE).cast(pa.int64())
        sizes = _numpy(_one_array(column.fill_null(-1) if column.null_count else column))
    if names.count(_CHECKSUM) == 1:
        checksums = _one_array(table.column(_CHECKSUM))
    return keys, sizes, checksums


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _numpy(column: pa.Int64Array) -> npt.NDArray[np.int64]:
    """Arrow's int64 without nulls as NumPy's: a view. ``to_numpy`` imports pandas."""
    values = np.frombuffer(column.buffers()[1] or b"", np.int64)
    return values[column.offset : column.offset + len(column)]


def _int64s(values: Indices) -> pa.Int64Array:
    """A NumPy array as Arrow's, without a copy and without ``pa.array``, which imports pandas."""
    buffer = pa.py_buffer(np.ascontiguousarray(values, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(values), [None, buffer])


def _lies_in(keys: pa.LargeBinaryArray, mapping: pa.Buffer) -> bool:
    """The keys are read from the mapped file itself, not from a copy."""
    values = keys.buffers()[2]
    if values is None:
        return False
    begin: int = mapping.address
    return bool(begin <= values.address <= begin + mapping.size)


def _seal(fd: int) -> None:
    """Make a memfd immutable, whoever holds it."""
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _absolute(path: bytes) -> bytes:
    """Absolute, for processes that run elsewhere. ``..`` stays: it may follow a link."""
    if is_object(path):
        return path
    if b".." in path.split(b"/"):
        return os.path.join(os.getcwdb(), path)
    return os.path.abspath(path)


def _described(source: object) -> str:
    if isinstance(source, str | bytes | os.PathLike):
        path = os.fsencode(source)
        is_glob = has_magic(path) and not os.path.exists(path)
        return _shown(path) + (" (a glob names files; ** is any depth)" if is_glob else "")
    return "an empty list" if not isinstance(source, Catalog) else "an empty catalog"


def _shown(path: bytes) -> str:
    return printable(os.fsdecode(path))


def _reason(error: Exception) -> str:
    """An error's own words, on one line."""
    words = error.strerror if isinstance(error, OSError) else None
    return words or (str(error).splitlines() or [type(error).__name__])[0]
