"""What a POSIX directory holds: a walk over byte strings, with a glob as an optional filter."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from rayloader.errors import CatalogError, printable

_ANY_DEPTH = "**"
_MAGIC = re.compile(rb"[*?\[]")
_Ident = tuple[int, int]
_States = frozenset[int]


class PosixLister:
    """Lists everything below a directory that is not itself a directory.

    Symbolic links are followed; a link to a directory that contains it is a loop and is left
    out. No name is left out for its first character. What cannot be a sample (a dangling
    link, a FIFO) is listed all the same, so that reading it gives the error that names it.

    Args:
        pattern: keep only keys that match this glob, relative to the root. ``*``, ``?`` and
            ``[…]`` stay within one path component; a component ``**`` stands for any number of
            directories, also none.
    """

    def __init__(self, pattern: bytes | None = None) -> None:
        self._filter = Glob(_ANY_DEPTH if pattern is None else os.fsdecode(pattern))
        self._everything = pattern is None
        self.metadata_ops = 0
        """Directories opened and read so far [operations]."""

    def list(self, root: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield (key relative to root, -1), in no particular order.

        Raises:
            CatalogError: a directory cannot be read; it is named.
        """
        todo: _Pending = [(b"", None, self._filter.start)]
        while todo:
            prefix, above, states = todo.pop()
            self.metadata_ops += 2
            here = _Chain(_identity(root, prefix), above)
            if above is not None and here.is_loop():
                continue
            for entry in _scan(root, prefix):
                key = prefix + entry.name
                after = states if self._everything else self._filter.step(states, entry.name)
                if _is_directory(entry):
                    if self._filter.goes_on(after):
                        todo.append((key + b"/", here, after))
                elif self._everything or self._filter.accepts(after):
                    yield key, -1


class _Chain:
    """A directory and the directories on the way to it."""

    __slots__ = ("above", "ident")

    def __init__(self, ident: _Ident, above: _Chain | None) -> None:
        self.ident = ident
        self.above = above

    def is_loop(self) -> bool:
        """This directory is also on the way to itself."""
        step = self.above
        while step is not None:
            if step.ident == self.ident:
                return True
            step = step.above
        return False


_Pending = list[tuple[bytes, _Chain | None, _States]]


class Glob:
    """A glob as an automaton over path components: one walk visits each directory once.

    A state i means: components before i have matched.
    """

    def __init__(self, pattern: str) -> None:
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        self._match: list[Callable[[str], Any] | None] = [
            None if part == _ANY_DEPTH else re.compile(fnmatch.translate(part)).match
            for part in parts
        ]
        self.start = self._closed({0})

    def matches(self, key: bytes) -> bool:
        """Whether a whole key matches: its components one after the other."""
        states = self.start
        for name in key.split(b"/"):
            states = self.step(states, name)
        return self.accepts(states)

    def step(self, states: _States, name: bytes) -> _States:
        """The states after one more component."""
        text = os.fsdecode(name)
        after = set()
        for state in states:
            if state == len(self._match):
                continue
            match = self._match[state]
            if match is None:
                after.add(state)
            elif match(text):
                after.add(state + 1)
        return self._closed(after)

    def accepts(self, states: _States) -> bool:
        """The whole pattern has matched."""
        return len(self._match) in states

    def goes_on(self, states: _States) -> bool:
        """Something below may still match."""
        return any(state < len(self._match) for state in states)

    def _closed(self, states: set[int]) -> _States:
        """``**`` also stands for nothing."""
        for state in range(len(self._match)):
            if state in states and self._match[state] is None:
                states.add(state + 1)
        return frozenset(states)


def has_magic(path: bytes) -> bool:
    """Whether a path contains glob characters."""
    return _MAGIC.search(path) is not None


def split_glob(pattern: bytes) -> tuple[bytes, bytes]:
    """Cut a glob into the directory before its first wildcard and the pattern below it."""
    found = _MAGIC.search(pattern)
    cut = pattern.rfind(b"/", 0, found.start() if found else len(pattern)) + 1
    return pattern[:cut] or b".", pattern[cut:]


def _identity(root: bytes, prefix: bytes) -> _Ident:
    try:
        status = os.stat(os.path.join(root, prefix))
    except OSError as error:
        raise _unlistable(root, prefix, error) from error
    return status.st_dev, status.st_ino


def _scan(root: bytes, prefix: bytes) -> Iterator[os.DirEntry[bytes]]:
    try:
        with os.scandir(os.path.join(root, prefix)) as entries:
            yield from entries
    except OSError as error:
        raise _unlistable(root, prefix, error) from error


def _is_directory(entry: os.DirEntry[bytes]) -> bool:
    """A directory or a link to one. A link that leads nowhere or to itself is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _unlistable(root: bytes, prefix: bytes, error: OSError) -> CatalogError:
    name = printable(os.fsdecode(os.path.join(root, prefix)))
    return CatalogError(f"{name}: the directory cannot be listed: {error.strerror}")
