"""Is the cluster ready? The checks of :mod:`rayloader.experiment.doctor` on every node of a Ray.

Ray is imported inside functions only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rayloader import cluster
from rayloader.catalog import Catalog, root_of_source
from rayloader.config import Options
from rayloader.errors import RayloaderError, printable
from rayloader.experiment import doctor
from rayloader.experiment.doctor import Finding, Wanted
from rayloader.experiment.report import version
from rayloader.fleet.fleet import Fleet
from rayloader.storage.access import Access
from rayloader.storage.uri import is_object

NODE_SECONDS = 60.0
"""A node must have examined itself within this [s]."""
CLOCKS_APART = 1.0
"""Clocks of nodes that differ by more make logs and records hard to compare [s]."""


def examine(
    source: Any, options: Options, ranks: int, out: str | None, read: bool
) -> dict[str, list[Finding]]:
    """All checks: those of this machine, of the source, of every node of the Ray, and a trial.

    Args:
        source: as ``RankDataset`` takes it; ``None``: only the machines are looked at.
        options: of the readers.
        ranks: on each node.
        out: where results are to be written; ``None``: nowhere.
        read: have a rank read a few files, and name what limits it.

    Returns:
        Findings by what they are about.
    """
    wanted = Wanted(ranks=ranks, concurrency=options.concurrency, memory_bytes=options.memory_bytes)
    found = {"this machine": doctor.machine(wanted)}
    sample = None
    if source is not None:
        sample, found["source"] = _source(source, options, out)
    connection, found["Ray"] = _ray(options)
    if connection is None:
        return found
    found |= _nodes(wanted, sample, connection)
    if sample is not None and read:
        found["a trial"] = [_trial(sample, options)]
    return found


def _source(source: Any, options: Options, out: str | None) -> tuple[Catalog | None, list[Finding]]:
    access = Access.found(os.environ, options)
    try:
        objects = is_object(root_of_source(source))
        before = doctor.endpoint(access, _bucket(source)) if objects and _is_s3(source) else []
        sample, finding = doctor.listed(source, access)
    except RayloaderError as error:
        return None, [Finding("source", "bad", str(error), "another source")]
    more = doctor.files(sample, out) if sample is not None and not objects else []
    return sample, [*before, finding, *more]


def _is_s3(source: Any) -> bool:
    return isinstance(source, str) and source.startswith("s3://")


def _bucket(source: str) -> str:
    return source.removeprefix("s3://").partition("/")[0]


def _ray(options: Options) -> tuple[cluster.Connection | None, list[Finding]]:
    """The Ray that was joined, and what is to say of it; ``None``: it cannot be used."""
    began = time.perf_counter()
    try:
        connection = cluster.connect(options.ray, start_timeout=options.start_timeout)
    except RayloaderError as error:
        cure = "ray start --head here, another address, or --ray private"
        return None, [Finding("Ray", "bad", str(error), cure)]
    seconds = time.perf_counter() - began
    if connection.private:
        says = f"a private one was started and joined in {seconds:.1f} s"
        return connection, [Finding("Ray", "ok", says)]
    joined = Finding("Ray", "ok", f"{connection.address} was joined in {seconds:.1f} s")
    return connection, [joined, _protected(connection.address), *_token_file(os.environ)]


def _protected(address: str) -> Finding:
    """Whether a Ray refuses who has no token: by asking its GCS, from a process without one."""
    environ = {name: it for name, it in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", _ASK, address]
    try:
        ran = subprocess.run(command, env=environ, capture_output=True, timeout=NODE_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding("token", "unknown", "it gives no answer to who has no token")
    if ran.returncode:
        if b"uthenticat" in ran.stderr:
            says = "this process has the right one; without one it is refused"
            return Finding("token", "ok", says)
        return Finding("token", "unknown", "who has no token gets an error that speaks of none")
    return Finding(
        "token",
        "warning",
        "it asks nobody for a token: who reaches it can run code in it",
        "RAY_AUTH_MODE=token for all its processes, and the same token: docs/launch.md",
    )


_ASK = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)
"""


def _token_file(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether others on this machine can read the token that this user's Ray keeps in a file."""
    path = environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    if environ.get("RAY_AUTH_TOKEN"):
        return
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode & 0o777
        if mode & 0o077:
            says = f"other users of this machine can read {printable(path)} (mode {mode:o})"
            yield Finding("token's file", "warning", says, f"chmod 600 {printable(path)}")


class Examiner:
    """An actor that examines its node."""

    def look(self, wanted: Wanted, sample: tuple[bytes, list[bytes]] | None) -> dict[str, Any]:
        """Who this node is, what its clock says, and its findings.

        Args:
            wanted: what it is to be ready for.
            sample: root and names of a few files; ``None``: there are none to look for.
        """
        seen: list[Seen] | None = None
        if sample is not None:
            root, keys = sample
            seen = [_identity(os.path.join(root, key)) for key in keys]
        return {
            "host": platform.node(),
            "time": time.time(),
            "versions": {name: version(name) for name in ("rayloader", "ray", "torch", "pyarrow")}
            | {"python": platform.python_version()},
            "findings": doctor.machine(wanted),
            "files": seen,
        }


class Seen(NamedTuple):
    """What one process sees under a path; all -1: nothing."""

    size: int = -1
    changed: int = -1
    inode: int = -1
    device: int = -1


def _identity(path: bytes) -> Seen:
    try:
        status = os.stat(path)
    except OSError:
        return Seen()
    return Seen(status.st_size, int(status.st_mtime), status.st_ino, status.st_dev)


def _nodes(
    wanted: Wanted, sample: Catalog | None, connection: cluster.Connection
) -> dict[str, list[Finding]]:
    """A reader's view of this node, the other nodes' own checks, and what all must have alike."""
    import ray

    files = None
    if sample is not None and not is_object(sample.root):
        files = sample.root, sample.keys_at(np.arange(len(sample)))
    here = Examiner().look(wanted, files)
    found: dict[str, list[Finding]] = {}
    for node in [node for node in ray.nodes() if node["Alive"]]:
        own = node["NodeID"] == connection.node_id
        name = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        name = "a reader here" if own else name
        actor = ray.remote(Examiner).options(**cluster.place_on(node["NodeID"])).remote()
        began = time.time()
        try:
            there = ray.get(actor.look.remote(wanted, files), timeout=NODE_SECONDS)
        except ray.exceptions.RayError as error:
            text = str(error).strip().splitlines()[-1][:200]
            found[name] = [Finding("node", "bad", f"it does not answer: {text}", "ray status")]
            continue
        finally:
            ray.kill(actor)
        middle, spread = (began + time.time()) / 2, time.time() - began
        found[name] = (
            _as_here(here, there)
            if own
            else [*there["findings"], *_alike(here, there, there["time"] - middle, spread)]
        )
    return found


def _as_here(here: dict[str, Any], there: dict[str, Any]) -> list[Finding]:
    """What a reader on this node meets that this process does not: limits, and other files.

    It has what Ray was started with, maybe in another container.
    """
    states = {it.check: it.state for it in here["findings"]}
    found = [it for it in there["findings"] if it.state != states.get(it.check)]
    if not found:
        found.append(Finding("limits", "ok", "a reader meets the same as this process"))
    if here["files"] is not None:
        found.append(_same_files(here["files"], there["files"]))
    return found


def _same_files(here: list[Seen], there: list[Seen]) -> Finding:
    """Whether two processes of one node see the same files under the same paths."""
    pairs = [(mine, other) for mine, other in zip(here, there, strict=True) if mine != Seen()]
    missing = sum(other == Seen() for _, other in pairs)
    others = sum(mine[:3] != other[:3] for mine, other in pairs) - missing
    if missing or others:
        return Finding(
            "same files",
            "bad",
            f"of {len(pairs)} files {missing} are not there for a reader on this node, and "
            f"{others} are others",
            "Ray runs in another container or chroot: mount the data there under the same path",
        )
    if any(mine.device != other.device for mine, other in pairs):
        return Finding(
            "same files",
            "warning",
            "a reader sees the same inodes on another device: another mount of the same storage?",
            "one mount for both, so that what is said of this one holds for readers",
        )
    return Finding("same files", "ok", "a reader sees the same ones (device and inode)")


def _alike(
    here: dict[str, Any], there: dict[str, Any], away: float, spread: float
) -> list[Finding]:
    """What two nodes must have in common.

    Args:
        here: what this node says of itself.
        there: what the other does.
        away: its clock is so far ahead [s].
        spread: give or take half of this [s].
    """
    found = []
    differing = [name for name, mine in here["versions"].items() if there["versions"][name] != mine]
    if differing:
        says = ", ".join(
            f"{name} {there['versions'][name]} there, {here['versions'][name]} here"
            for name in differing
        )
        found.append(Finding("same versions", "bad", says, "install the same on every node"))
    else:
        found.append(Finding("same versions", "ok", "as here"))
    if abs(away) > CLOCKS_APART + spread / 2:
        says = f"its clock is {away:+.1f} s from this one"
        found.append(Finding("clock", "warning", says, "set it (chrony)"))
    else:
        found.append(Finding("clock", "ok", "as here, as far as messages can tell"))
    if here["files"] is not None:
        pairs = list(zip(here["files"], there["files"], strict=True))
        missing = sum(other == Seen() != mine for mine, other in pairs)
        changed = sum(mine[:2] != other[:2] for mine, other in pairs) - missing
        if missing or changed:
            says = f"of {len(here['files'])} files {missing} are not there, and {changed} differ"
            found.append(Finding("same files", "bad", says, "mount the same data on every node"))
        else:
            found.append(Finding("same files", "ok", "all that were looked at are there too"))
    return found


def _trial(sample: Catalog, options: Options) -> Finding:
    """What limits one rank that reads a few entries of the source."""
    try:
        with Fleet(sample, 1, options=options, progress=False) as fleet:
            fleet.run_epoch()  # the first pays for memory that is touched for the first time
            report = fleet.run_epoch()
    except RayloaderError as error:
        return Finding("reading", "bad", f"{type(error).__name__}: {error}", "see the message")
    state: doctor.State = "unknown" if report.limit.name == "unclear" else "ok"
    return Finding(
        "reading",
        state,
        f"a rank read {report.files} entries at {report.bytes_per_second / 1e6:,.0f} MB/s, "
        f"{report.files_per_second:,.0f}/s; {report.limit}",
        "rayloader sweep says what more ranks and reads in flight do",
    )
