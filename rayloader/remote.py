"""The trainer's hand on its reader: the actor, the channel to it and the memory between them."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from rayloader import arena, cluster
from rayloader.catalog import Catalog
from rayloader.channel import Channel, Delivery, ReaderGone, ReaderProcess
from rayloader.channel.local import LocalChannel, TrainerMemory
from rayloader.channel.objects import RayChannel
from rayloader.config import PAGE, RAY_ADDRESS_SPACE, TABLES_BYTES, USUAL_PROCESSES, Options
from rayloader.errors import (
    ChannelError,
    ClusterError,
    OptionError,
    RayloaderError,
    ReaderLost,
    StorageStalled,
    UsageError,
    chained,
)
from rayloader.launch import Launch
from rayloader.limits import OomKills, too_few_processes, too_little_address_space
from rayloader.reader import Ended, ReaderCounts, Request, Warned
from rayloader.storage.access import Access
from rayloader.storage.uri import is_object
from rayloader.tally import Tally

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("rayloader")

_CAUSE_LETTERS = 300
"""Of Ray's own words, at most so much is repeated [characters]."""


class RemoteReader:
    """A reader actor that was started, may be started again, and ends with its trainer."""

    def __init__(
        self, options: Options, launch: Launch, catalog: Catalog | None, access: Access
    ) -> None:
        """Prepare a reader of ``catalog``; nothing runs before :meth:`start`."""
        self._options = options
        self._reads_objects = catalog is None or is_object(catalog.root)
        self._access = access if self._reads_objects else None
        self._launch = launch
        self._catalog = catalog
        self._owned = _Owned()
        self._begun: Any = None
        self._counted: ReaderCounts | None = None
        """What a reader had counted when it was set aside."""
        self._warned_of_mask = False
        self.name = ""
        """The channel's name, ``local`` or ``ray``."""
        self.concurrency = options.concurrency
        """Ceiling on reads in flight [reads]."""
        self.memory_bytes = options.memory_bytes
        """The bound on batches in memory that is in force [bytes]."""
        self.welcome: dict[str, Any] = {"pid": 0, "engine": "", "client": "", "affinity": []}
        """What the reader, or the last one, said of itself."""
        self._oom_kills: OomKills | None = None
        weakref.finalize(self, self._owned.close)

    def start(self) -> None:
        """Join Ray, make the arena, start the actor and attach to it.

        Raises:
            OptionError: this process may not map as much memory as it takes.
            ClusterError: Ray cannot be joined, or cannot place the actor here.
            ReaderLost: the actor does not come up within ``start_timeout``.
            ReaderGone: it died while starting; :meth:`restart` starts another.
        """
        if few := too_little_address_space(self._options.memory_bytes + RAY_ADDRESS_SPACE):
            raise OptionError(f"too little address space for Ray and batches: {few}")
        self._join()  # before the arena is measured, because Ray takes memory too
        self._owned.memory = TrainerMemory(self._arena_bytes())
        if self._options.deliver:
            in_transit = self._options.ranges_bytes if self._reads_objects else 0
            self.memory_bytes = self._owned.memory.length + in_transit
        if self._catalog is not None:
            self._owned.catalog_fd = self._catalog.to_fd()
        self._attach()

    def restart(self) -> None:
        """Replace a dead or hanging reader; what the trainer holds stays where it is.

        Raises:
            ReaderGone: the new one did not come up either.
        """
        ended = self._owned.channel is None or self._owned.channel.kill()
        self._owned.end_reader()
        if not ended:
            self._owned.leave_memory()
        self._replace()

    def why_gone(self, gone: ReaderGone) -> str:
        """Why the reader is gone, in one line, as far as that is known."""
        why = str(gone).splitlines()[0]
        if self._oom_kills is not None and self._oom_kills.risen:
            why += (
                "; the kernel's out-of-memory killer struck in its memory cgroup meanwhile: lower "
                "memory_bytes, or allow the cgroup more"
            )
        return why

    def _set_aside(self) -> None:
        """End a reader of which a read hangs; the next request is given to a new one.

        Its memory goes with it, because the read may still come back into it.
        """
        self._counted = self.counts()
        self._owned.end_reader()
        self._owned.leave_memory()

    def _replace(self) -> None:
        try:
            self._attach()
        except ReaderGone:
            raise
        except (ReaderLost, ChannelError, ClusterError, OSError) as failure:
            raise ReaderGone(str(failure)) from failure

    def close(self) -> None:
        """End the reader and give the memory back, as far as nobody holds batches in it."""
        self._owned.close()

    def begin(self, request: Request, files: Catalog | None) -> None:
        """Have the reader begin an epoch of its catalog or of an explicit list.

        Raises:
            ReaderGone: there is no reader, or none could be made in place of one set aside.
        """
        if self._owned.channel is None:
            self._replace()
        if files is not None:
            self._require_readable(files)
        self._begun = None
        if not self._channel.begin(request):
            names = files.keys if files is not None else None
            root = files.root if files is not None else b""
            sizes = files.sizes if files is not None else None
            self._begun = self._owned.actor.begin_epoch.remote(request, names, root, sizes)

    def _require_readable(self, files: Catalog) -> None:
        """A reader of a catalog is a reader of files, or of objects.

        Raises:
            UsageError: the list is of the other kind.
        """
        known = self._catalog
        if known is not None and is_object(known.root) != is_object(files.root):
            mine, other = ("objects", "files") if is_object(known.root) else ("files", "objects")
            raise UsageError(
                f"the source of this data set has {mine}, and the list has {other}: make another "
                "data set for them, or one without a source"
            )

    def abandon(self, generation: int) -> None:
        """What was asked for is not wanted any more.

        Raises:
            ReaderGone: there is no reader to tell.
        """
        self._channel.abandon(generation)

    def receive(self) -> Delivery | Ended | Warned:
        """Wait for the next thing; see :meth:`~rayloader.channel.Channel.receive`."""
        try:
            return self._channel.receive(self._check_begun)
        except StorageStalled:
            self._set_aside()
            raise

    def counts(self) -> ReaderCounts | None:
        """What the reader has counted in the running epoch."""
        channel = self._owned.channel
        return channel.counts() if channel is not None else self._counted

    def tell(self, tally: Tally) -> None:
        """Count what happened in the trainer, for the reader's metrics."""
        if self._owned.memory is not None:
            self._owned.memory.tally.add(tally)

    def set_concurrency(self, options: Options) -> None:
        """Change the ceiling on reads in flight, here and for readers started later."""
        self._options = options
        self.concurrency = options.concurrency
        if self._owned.channel is not None:
            with contextlib.suppress(ReaderGone):  # its successor will know
                self._owned.channel.set_concurrency(options.concurrency)

    @property
    def _channel(self) -> Channel:
        if self._owned.channel is None:
            raise ReaderGone("there is no reader")
        return self._owned.channel

    def _arena_bytes(self) -> int:
        options = self._options
        if not options.deliver:
            return max(TABLES_BYTES, 8 * arena.table_bytes(options.batch_size))
        wanted = options.memory_bytes - (options.ranges_bytes if self._reads_objects else 0)
        length = arena.affordable(wanted, self._launch.local_world_size)
        if length < wanted // PAGE * PAGE:
            log.warning(
                "memory_bytes=%s is more than this rank's share of the memory that its cgroup has "
                "free; using %s",
                f"{options.memory_bytes:,}",
                f"{length:,}",
            )
        return length

    def _join(self) -> None:
        options = self._options
        self._connection = cluster.connect(
            options.ray,
            run_id=self._launch.run_id,
            start_timeout=options.start_timeout,
            node_cpus=self._launch.node_cpus,
        )

    def _attach(self) -> None:
        """Start an actor on this node and open the channel that reaches it."""
        self._join()
        import ray

        timeout = self._options.start_timeout

        def listening() -> tuple[Any, str]:
            actor = self._place()
            return actor, ray.get(actor.listen.remote(), timeout=timeout)

        try:
            self._owned.actor, address = cluster.promptly(listening)
            channel = self._owned.channel = self._connect(address)
        except ray.exceptions.RayError as failure:
            raise _start_error(failure, timeout) from chained(failure)
        self.name, self.welcome = channel.name, channel.welcome
        here = self._connection.same_node
        self._oom_kills = OomKills(channel.welcome["pid"]) if here else None

    def _place(self) -> Any:
        import ray

        from rayloader.actor import CALLS_AT_ONCE, ReaderActor

        placement = cluster.place_reader(self._connection)
        actor = ray.remote(ReaderActor).options(max_concurrency=CALLS_AT_ONCE, **placement)
        job = ray.get_runtime_context().get_job_id()
        run = self._launch.run_name or self._launch.run_id or f"job {job}"
        return actor.remote(self._options, self._cpus(), run)

    def _connect(self, address: str) -> Channel:
        import ray

        options, memory, actor = self._options, self._owned.memory, self._owned.actor
        assert memory is not None
        if options.channel != "ray":
            try:
                return LocalChannel(
                    address,
                    memory,
                    self._owned.catalog_fd,
                    timeout=options.start_timeout,
                    tell_taken=options.read_ahead_batches is not None,
                    on_demand=options.read_ahead_batches == 0,
                    access=self._access,
                )
            except OSError as unreachable:
                # Raises if the actor is dead, and is no answer if it lives.
                ray.get(actor.__ray_ready__.remote(), timeout=options.start_timeout)
                if options.channel == "local":
                    raise ChannelError(
                        f"the reader's socket cannot be reached from this process ({unreachable}); "
                        'channel="auto" would use Ray\'s object store'
                    ) from unreachable
        known = self._catalog
        names: pa.Array | None = known.keys if known is not None else None
        root, sizes = (known.root, known.sizes) if known is not None else (b"", None)
        checksums = known.checksums if known is not None and options.verify else None
        serving = actor.serve.remote(names, root, sizes, checksums, memory.length)
        welcome = cluster.promptly(lambda: ray.get(serving, timeout=options.start_timeout))
        process = ReaderProcess(welcome["pid"]) if self._connection.same_node else None
        return RayChannel(actor, welcome, process, memory.tally)

    def _cpus(self) -> list[int]:
        """The CPUs of the reader; empty where they cannot be told from here."""
        if not self._connection.same_node:
            return []
        mine = sorted(os.sched_getaffinity(0))
        if self._options.cpus == "node":
            return list(self._launch.node_cpus or range(os.cpu_count() or 1))
        if len(mine) < 2 and self._launch.local_rank == 0 and not self._warned_of_mask:
            self._warned_of_mask = True
            log.warning(
                "rank %d may use only CPU %s, and so may its reader: set cpus='node', or start "
                "the ranks without binding them (mpirun --bind-to none)",
                self._launch.rank,
                mine[0],
            )
        return mine

    def _check_begun(self) -> None:
        """A request that the reader refused must not be waited for."""
        import ray

        if self._begun is None or not ray.is_initialized():
            return
        if not ray.wait([self._begun], timeout=0)[0]:
            return
        try:
            ray.get(self._begun)
        except ray.exceptions.RayTaskError as failed:
            raise ReaderGone(
                f"the reader could not begin the epoch: {_cause(failed)}"
            ) from chained(failed)
        except ray.exceptions.RayError as lost:
            log.debug("the actor's answer is lost; its socket lives: %s", lost)


class _Owned:
    """What must be given back, kept apart so that a forgotten reader can be collected."""

    def __init__(self) -> None:
        self.actor: Any = None
        self.channel: Channel | None = None
        self.memory: TrainerMemory | None = None
        self.catalog_fd: int | None = None
        self.pid = os.getpid()

    def end_reader(self) -> None:
        """Let the channel go and kill the actor, if it still is."""
        channel, actor = self.channel, self.actor
        self.channel = self.actor = None
        if channel is not None:
            channel.close()
        if actor is not None:
            import ray

            with contextlib.suppress(Exception):
                if ray.is_initialized():
                    ray.kill(actor, no_restart=True)

    def leave_memory(self) -> None:
        """Take a new arena: a dead reader's read that hangs may still come back into this one."""
        assert self.memory is not None
        left, self.memory = self.memory, TrainerMemory(self.memory.length)
        left.tally.move_to(self.memory.tally)
        left.close()

    def close(self) -> None:
        """Give everything back; in a forked child there is nothing to give."""
        if os.getpid() != self.pid:
            return
        self.end_reader()
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        if self.catalog_fd is not None:
            os.close(self.catalog_fd)
            self.catalog_fd = None


def _start_error(failure: Exception, timeout: float) -> RayloaderError:
    """What Ray's error means for whoever wanted a reader."""
    from ray import exceptions as ray_says

    if placement := cluster.cluster_error(failure):
        return placement
    if isinstance(failure, ray_says.GetTimeoutError):
        return ReaderLost(f"the reader did not come up within start_timeout={timeout:g} s")
    if isinstance(failure, ray_says.RayActorError):
        if few := too_few_processes(USUAL_PROCESSES):
            return ReaderLost(f"the reader died while starting: {few}")
        return ReaderGone(f"the reader died while starting: {_cause(failure)}")
    if isinstance(failure, ray_says.RayTaskError) and isinstance(failure.cause, RayloaderError):
        return failure.cause
    return ReaderLost(f"the reader could not start: {_cause(failure)}")


def _cause(failure: BaseException) -> str:
    """The one line that tells, of what Ray reports: the user's error without Ray's stack."""
    if isinstance(cause := getattr(failure, "cause", None), BaseException):
        return f"{type(cause).__name__}: {cause}"
    lines = [line for line in str(failure).strip().splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("The actor is dead because")] or lines
    return telling[-1].strip()[:_CAUSE_LETTERS] if telling else type(failure).__name__
