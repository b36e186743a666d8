"""The consumers of a Fleet: started, replaced and ended. One actor per rank, spread over the nodes.

Ray is imported inside functions only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import platform
import select
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from rayloader import cluster
from rayloader.catalog import Catalog
from rayloader.config import (
    ALONE_READS,
    ALONE_SECONDS,
    DROP_SECONDS,
    RANK_END_SECONDS,
    Options,
)
from rayloader.errors import ClusterError, PlacementFailed, RayloaderError, ReaderLost, chained
from rayloader.fleet.consumer import CALLS_AT_ONCE, Consumer, SharedCatalog
from rayloader.fleet.work import Hello
from rayloader.launch import Launch


@dataclasses.dataclass
class Member:
    """The consumer of a rank.

    Attributes:
        rank: whose.
        node_id: where, hex.
        actor: Ray's handle.
        hello: who it said it is.
    """

    rank: int
    node_id: str
    actor: Any
    hello: Hello


class Crew:
    """All consumers. Calls may come from several threads; they wait for each other."""

    def __init__(self, catalog: Catalog, options: Options) -> None:
        """Prepare consumers that read ``catalog``; none starts before :meth:`grow`."""
        self.catalog = catalog
        self.options = options
        self._members: list[Member] = []
        self._fd = -1
        self._copy: Any = None
        self._alone: float | None = None
        self._connection: cluster.Connection | None = None
        self._lock = threading.RLock()

    @property
    def members(self) -> list[Member]:
        """In the order of their ranks."""
        return list(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def grow(self, ranks: int) -> None:
        """Start consumers until there are so many; those that are there are left alone.

        Raises:
            ClusterError: Ray cannot be joined, or cannot place one.
            RayloaderError: one cannot open its data set.
        """
        with self._lock:
            self._join()
            alive = self._nodes()
            places = self._places(range(len(self._members), ranks), alive)
            starting = [
                (rank, node_id, self._start(rank, node_id, ranks, len(alive)))
                for rank, node_id in places.items()
            ]
            try:
                self._members += [
                    Member(rank, node_id, actor, self._opened(actor, opening))
                    for rank, node_id, (actor, opening) in starting
                ]
            except BaseException:
                known = {id(member.actor) for member in self._members}
                _kill(actor for _, _, (actor, _) in starting if id(actor) not in known)
                raise

    def shrink(self, ranks: int) -> None:
        """End consumers until there are no more than so many: the last ones."""
        with self._lock:
            leaving, self._members = self._members[ranks:], self._members[:ranks]
            _end(leaving)

    def replace(self, lost: Member) -> Member:
        """Start a consumer for a rank whose own is dead, on the same node if that lives.

        Raises:
            ClusterError: Ray cannot place it.
            RayloaderError: it cannot open its data set.
        """
        with self._lock:
            _kill([lost.actor])
            self._join()
            alive = self._nodes()
            others = [member for member in self._members if member is not lost]
            node_id = lost.node_id
            if node_id not in alive:
                node_id = _least(alive, _ranks_on(others))
            actor, opening = self._start(lost.rank, node_id, len(self._members), len(alive))
            member = Member(lost.rank, node_id, actor, self._opened(actor, opening))
            self._members[self._members.index(lost)] = member
            return member

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight, of all ranks and of those to come [reads]."""
        self.options = self.options.replace(concurrency=concurrency)
        for member in self.members:
            with contextlib.suppress(Exception):  # whoever replaces a dead one will know
                member.actor.set_concurrency.remote(concurrency)

    def read_alone(self) -> float | None:
        """How long a read of this source takes while there is no other; measured once [s].

        ``None``: it could not be measured.
        """
        import ray

        with self._lock:
            if self._alone is None and self._members:
                count = min(len(self.catalog), ALONE_READS)
                entries = np.linspace(0, len(self.catalog) - 1, count).astype(int).tolist()
                asked = self._members[0].actor.read_alone.remote(entries)
                with contextlib.suppress(ray.exceptions.RayError):
                    self._alone = ray.get(asked, timeout=ALONE_SECONDS)
            return self._alone

    def page_cache(self, drop: bool) -> list[float | None]:
        """Share of the files that each node's page cache holds [0..1]; ``None``: unknown.

        Args:
            drop: first have each node forget them, as far as they are written.

        Raises:
            RayloaderError: a consumer does not answer.
        """
        import ray

        with self._lock:
            one_of_each = {member.node_id: member for member in reversed(self._members)}
            asked = [member.actor.page_cache.remote(drop) for member in one_of_each.values()]
            try:
                shares: list[float | None] = ray.get(asked, timeout=DROP_SECONDS)
            except ray.exceptions.RayError as failure:
                raise error_of(failure, f"within {DROP_SECONDS:g} s") from chained(failure)
            return shares

    def close(self) -> None:
        """End every consumer. Idempotent."""
        self.shrink(0)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._copy = None

    def _join(self) -> None:
        self._connection = cluster.connect(
            self.options.ray, start_timeout=self.options.start_timeout
        )

    def _nodes(self) -> list[str]:
        """Ids of the nodes that are alive, this process's own first."""
        import ray

        assert self._connection is not None
        here = self._connection.node_id
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [here] * (here in alive) + sorted(alive - {here})

    def _places(self, ranks: Iterable[int], alive: list[str]) -> dict[int, str]:
        """The node of each new rank: that with the fewest so far."""
        taken = _ranks_on(self._members)
        places: dict[int, str] = {}
        for rank in ranks:
            places[rank] = _least(alive, taken)
            taken[places[rank]] += 1
        return places

    def _start(self, rank: int, node_id: str, ranks: int, nodes: int) -> tuple[Any, Any]:
        """Start an actor and have it open its data set; the actor, and what it will say."""
        import ray

        on_node = -(-ranks // max(1, nodes))
        launch = Launch(rank, ranks, min(rank, on_node - 1), on_node, None, "fleet")
        threads = max(1, (os.cpu_count() or 1) // on_node)
        actor = (
            ray.remote(Consumer)
            .options(max_concurrency=CALLS_AT_ONCE, **cluster.place_on(node_id))
            .remote(self._shared(node_id), self.options, launch, node_id, threads)
        )
        return actor, actor.open.remote()

    def _shared(self, node_id: str) -> SharedCatalog:
        """How a consumer on a node gets the catalog."""
        import ray

        assert self._connection is not None
        if self._fd < 0:
            self._fd = self.catalog.to_fd()
        here = self._connection.node_id
        if (node_id != here or not self._connection.same_node) and self._copy is None:
            self._copy = ray.put(self.catalog.dumps())
        owner = here if self._connection.same_node else ""
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return SharedCatalog(path, owner, self._copy, self.catalog.digest, node_id)

    def _opened(self, actor: Any, opening: Any) -> Hello:
        import ray

        timeout = 2 * self.options.start_timeout  # of the consumer, and then of its reader
        try:
            hello: Hello = ray.get(opening, timeout=timeout)
        except ray.exceptions.RayError as failure:
            _kill([actor])
            raise error_of(failure, f"within {timeout:g} s") from chained(failure)
        return hello


def error_of(failure: Exception, timeout: str = "in time") -> RayloaderError:
    """The error of rayloader's that one of Ray's carries, or tells."""
    from ray import exceptions as ray_says

    if placement := cluster.cluster_error(failure):
        return placement
    if isinstance(failure, ray_says.RayTaskError) and isinstance(failure.cause, RayloaderError):
        return failure.cause
    if isinstance(failure, ray_says.GetTimeoutError):
        return ReaderLost(f"a consumer did not answer {timeout}")
    if isinstance(failure, ray_says.RayActorError):
        return ReaderLost(f"a consumer is dead: {_last_line(failure)}")
    return ClusterError(f"a consumer failed: {_last_line(failure)}")


def _last_line(failure: Exception) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("The actor is dead because")] or lines
    return telling[-1][:300] if telling else type(failure).__name__


def _ranks_on(members: list[Member]) -> collections.Counter[str]:
    """How many ranks each node has."""
    return collections.Counter(member.node_id for member in members)


def _least(alive: list[str], ranks: collections.Counter[str]) -> str:
    """The node with the fewest ranks; the first of several.

    Raises:
        PlacementFailed: there is none.
    """
    if not alive:
        raise PlacementFailed("no node of this Ray is alive")
    return min(alive, key=lambda node_id: ranks[node_id])


def _end(members: list[Member]) -> None:
    """End consumers: each closes its data set first, if it still can."""
    if not members:
        return
    import ray

    if not ray.is_initialized():
        return
    with _awaited(members):
        with contextlib.suppress(Exception):
            closing = [member.actor.close.remote() for member in members]
            ray.wait(closing, num_returns=len(closing), timeout=RANK_END_SECONDS)
        _kill(member.actor for member in members)


@contextlib.contextmanager
def _awaited(members: list[Member]) -> Iterator[None]:
    """On the way out, wait until those of their processes that are seen from here have ended."""
    with contextlib.ExitStack() as held:
        ends, running = select.poll(), 0
        for member in members:
            if (process := _process(member.hello)) >= 0:
                held.callback(os.close, process)
                ends.register(process, select.POLLIN)
                running += 1
        yield
        deadline = time.monotonic() + RANK_END_SECONDS
        while running and (left := deadline - time.monotonic()) > 0:
            for process, _ in ends.poll(left * 1e3):
                ends.unregister(process)
                running -= 1


def _process(hello: Hello) -> int:
    """A pidfd of a consumer's process on this host; -1 where there is none."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(hello.pid)
        # Asked once the pidfd holds it. On another host, or in a namespace of its own, the id means
        # another process here.
        if hello.host == platform.node() and _is_ray(f"/proc/{hello.pid}"):
            return process
        os.close(process)
    return -1


def _is_ray(process: str) -> bool:
    with contextlib.suppress(OSError), open(f"{process}/cmdline", "rb") as file:
        return b"ray::Consumer" in file.read()
    return False


def _kill(actors: Iterable[Any]) -> None:
    import ray

    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)
