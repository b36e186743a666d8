"""Is the cluster ready? The checks of :mod:`rayloader.experiment.doctor` on every node of a Ray.

Ray is imported inside functions only.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import numpy as np

from rayloader import cluster
from rayloader.catalog import Catalog, root_of_source
from rayloader.config import Options
from rayloader.errors import RayloaderError
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
    found["Ray"] = _ray(options)
    if any(it.state == "bad" for it in found["Ray"]):
        return found
    found |= _nodes(wanted, sample)
    if sample is not None and read:
        found["a trial"] = [_trial(sample, options)]
    return found


def _source(source: Any, options: Options, out: str | None) -> tuple[Catalog | None, list[Finding]]:
    access = Access.found(os.environ, options)
    try:
        objects = is_object(root_of_source(source))
        before = doctor.endpoint(access) if objects and _is_s3(source) else []
        sample, finding = doctor.listed(source, access)
    except RayloaderError as error:
        return None, [Finding("source", "bad", str(error), "another source")]
    more = doctor.files(sample, out) if sample is not None and not objects else []
    return sample, [*before, finding, *more]


def _is_s3(source: Any) -> bool:
    return isinstance(source, str) and source.startswith("s3://")


def _ray(options: Options) -> list[Finding]:
    began = time.perf_counter()
    try:
        connection = cluster.connect(options.ray, start_timeout=options.start_timeout)
    except RayloaderError as error:
        return [
            Finding(
                "Ray", "bad", str(error), "ray start --head here, another address, or --ray private"
            )
        ]
    seconds = time.perf_counter() - began
    if connection.private:
        return [Finding("Ray", "ok", f"a private one was started and joined in {seconds:.1f} s")]
    said = [Finding("Ray", "ok", f"{connection.address} was joined in {seconds:.1f} s")]
    if os.environ.get("RAY_AUTH_MODE") != "token":
        said.append(
            Finding(
                "token",
                "warning",
                "RAY_AUTH_MODE is not set here: is that Ray protected?",
                "RAY_AUTH_MODE=token for all its processes: who reaches an open Ray owns it",
            )
        )
    return said


class Examiner:
    """An actor that examines its node."""

    def look(self, wanted: Wanted, sample: tuple[bytes, list[bytes]] | None) -> dict[str, Any]:
        """Who this node is, what its clock says, and its findings.

        Args:
            wanted: what it is to be ready for.
            sample: root and names of a few files; ``None``: there are none to look for.
        """
        seen: list[tuple[int, int]] | None = None
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


def _identity(path: bytes) -> tuple[int, int]:
    """What tells one file from another on any node: size and time of change; -1: not there."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, int(status.st_mtime)


def _nodes(wanted: Wanted, sample: Catalog | None) -> dict[str, list[Finding]]:
    """The other nodes' own checks, and what they must have in common with this one."""
    import ray

    files = None
    if sample is not None and not is_object(sample.root):
        files = sample.root, sample.keys_at(np.arange(len(sample)))
    here = Examiner().look(wanted, files)
    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    found: dict[str, list[Finding]] = {}
    for node in nodes:
        name = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
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
        found[name] = [*there["findings"], *_alike(here, there, there["time"] - middle, spread)]
    return found


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
        missing = sum(other == (-1, -1) for other in there["files"])
        changed = sum(
            mine != other for mine, other in zip(here["files"], there["files"], strict=True)
        )
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
        f"a rank read {report.files} entries at {report.bytes_per_second / 1e9:.3f} GB/s, "
        f"{report.files_per_second:,.0f}/s; {report.limit}",
        "rayloader sweep says what more ranks and reads in flight do",
    )
