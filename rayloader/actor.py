"""The Ray actor: one reader, one rank, for as long as training lasts.

Nothing heavy is imported at the top: a reader first leaves its launcher's environment and CPU
mask behind, and only then makes threads or imports what makes threads.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import socket

    import pyarrow as pa

    from rayloader.arena import Int64s
    from rayloader.catalog import Catalog
    from rayloader.channel.serve import Fetched, Link, QueueLink, ReaderLoop
    from rayloader.config import Options
    from rayloader.reader import Reader, Request
    from rayloader.storage.access import Access
    from rayloader.tally import Tally

CALLS_AT_ONCE = 16
"""Method calls served side by side; the trainer has at most six under way."""


class ReaderActor:
    """Holds one :class:`~rayloader.reader.Reader` and the thread that drives it."""

    def __init__(self, options: Options, cpus: Sequence[int], run: str) -> None:
        """Take this rank's CPUs, and none of its launcher's variables.

        Args:
            options: as the trainer has them.
            cpus: the CPUs to run on; empty: those this process was started with.
            run: the name of the rank's run, in metrics.
        """
        from rayloader.launch import scrubbed

        kept = scrubbed(os.environ)
        for name in set(os.environ) - set(kept):
            del os.environ[name]
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a reader multiplies no matrices
        if cpus:
            os.sched_setaffinity(0, set(cpus) & _cpus_here() or _cpus_here())
        self._options = options
        self._run = run
        self._ready = threading.Event()
        self._loop: ReaderLoop | None = None
        self._reader: Reader | None = None
        self._queue: QueueLink | None = None

    def listen(self) -> str:
        """Open the local channel and wait for the trainer in a thread of its own.

        Returns:
            The abstract socket's name. A trainer that does not come within ``start_timeout``
            leaves the actor as it was, ready for :meth:`serve`.
        """
        from rayloader.channel import serve

        listener = serve.listen_locally()
        self._start(self._serve_locally, listener)
        return str(listener.getsockname()[1:], "ascii")

    def serve(
        self,
        catalog: pa.Array | None,
        root: bytes,
        sizes: Int64s | None,
        checksums: pa.Array | None,
        memory_bytes: int,
    ) -> dict[str, Any]:
        """Open the Ray channel instead, with an arena of the reader's own.

        What there is to know of object storage, this process's own environment says: credentials
        do not travel through Ray.

        Args:
            catalog: the names, a large_binary array, or ``None`` when every request brings a list.
            root: the directory or object root that they are relative to.
            sizes: int64 [n], as far as they are known [bytes].
            checksums: of the names, where they are needed.
            memory_bytes: length of the arena [bytes].
        """
        from rayloader import arena
        from rayloader.catalog import Catalog
        from rayloader.channel import serve

        fd = arena.create_memory(memory_bytes)
        memory = memoryview(arena.map_memory(fd))
        os.close(fd)
        known = None if catalog is None else Catalog.of_files(catalog, root, sizes, checksums)
        self._queue = serve.QueueLink(memory)
        welcome = self._build(memory, known, None, self._queue)
        assert self._loop is not None
        self._start(self._loop.run)
        return welcome

    def begin_epoch(
        self, request: Request, files: pa.Array | None, root: bytes, sizes: Int64s | None
    ) -> None:
        """Read this instead of what was under way.

        Args:
            request: the whole position.
            files: the names of an explicit list, a large_binary array, or ``None``: the catalog.
            root: the directory or object root that relative names in ``files`` are relative to.
            sizes: int64 [n] of ``files``, as far as they are known [bytes].
        """
        from rayloader.catalog import Catalog

        self._ready.wait()
        assert self._loop is not None
        listed = None if files is None else Catalog.of_files(files, root, sizes)
        self._loop.begin(request, listed)

    def abandon(self, generation: int) -> None:
        """The Ray channel's trainer has left all requests before this one."""
        if self._queue is not None and self._loop is not None:
            self._queue.abandon(generation)
            self._loop.abandon(generation)

    def take(self, generation: int, index: int, counted: Tally) -> Fetched | None:
        """The Ray channel's next outcome; see :meth:`~rayloader.serve.QueueLink.take`."""
        assert self._queue is not None
        assert self._loop is not None
        assert self._reader is not None
        return self._queue.take(generation, index, counted, self._loop, self._reader)

    def set_concurrency(self, concurrency: int) -> None:
        """Change the ceiling on reads in flight [reads]."""
        loop, reader = self._loop, self._reader
        if loop is not None and reader is not None:
            loop.call(lambda: reader.set_concurrency(concurrency))

    def _serve_locally(self, listener: socket.socket) -> None:
        from rayloader.channel import serve
        from rayloader.errors import RayloaderError

        deadline = time.monotonic() + self._options.start_timeout
        try:
            trainer = serve.accept_trainer(listener, deadline)
        except TimeoutError:
            return
        finally:
            listener.close()
        link = serve.SocketLink(trainer.connection, trainer.pid)
        try:
            link.welcome(self._build(trainer.memory, trainer.catalog, trainer.access, link))
        except RayloaderError as error:
            link.refuse(error)
            raise
        assert self._loop is not None
        try:
            self._loop.run()
        except BaseException:
            link.last_words(traceback.format_exc())
            raise

    def _build(
        self, memory: memoryview, catalog: Catalog | None, access: Access | None, link: Link
    ) -> dict[str, Any]:
        """Make storage, reader and loop; say what they are."""
        from rayloader.channel.serve import ReaderLoop
        from rayloader.reader import Reader
        from rayloader.storage import StorageSpec, open_storage
        from rayloader.storage.access import Access
        from rayloader.storage.object import object_engine

        options = self._options
        access = access if access is not None else Access.found(os.environ, options)
        scheme = _scheme(catalog)
        storage = open_storage(
            StorageSpec(
                scheme=scheme,
                concurrency=options.concurrency,
                part_bytes=options.part_bytes,
                scratch_bytes=options.memory_bytes,
                direct=options.direct,
                drop_cache=options.drop_cache,
                engine=options.engine,
                client=options.client,
                ranges_bytes=options.ranges_bytes,
                peek=True,
                request_timeout=options.request_timeout,
                retry_seconds=options.retry_seconds,
                access=access,
            )
        )
        storage.attach(memory)
        self._reader = Reader(storage, memory, options)
        self._loop = ReaderLoop(self._reader, storage.fileno(), catalog, link)
        self._ready.set()
        self._publish()
        return {
            "pid": os.getpid(),
            "engine": storage.engine,
            "client": storage.engine if scheme == "s3" else object_engine(options.client, access),
            "affinity": sorted(os.sched_getaffinity(0)),
        }

    def _publish(self) -> None:
        """Tell Ray's metrics how the reader stands, in a thread, where Ray collects them."""
        from rayloader import metrics
        from rayloader.config import METRICS_SECONDS

        loop, reader = self._loop, self._reader
        if not metrics.wanted(os.environ) or loop is None or reader is None:
            return
        ask = functools.partial(loop.ask, reader.figures)
        threading.Thread(
            target=metrics.publish_regularly,
            args=(self._run, ask, METRICS_SECONDS, threading.Event().wait),
            name="rayloader-metrics",
            daemon=True,
        ).start()

    def _start(self, work: Any, *arguments: Any) -> None:
        """Run ``work`` in a thread; the process ends with it, whatever the reads do."""

        def body() -> None:
            try:
                work(*arguments)
            except BaseException:
                traceback.print_exc()
                _end(1)
            if self._loop is not None:
                from rayloader.config import CLOSE_SECONDS

                time.sleep(CLOSE_SECONDS)
                _end(0)

        threading.Thread(target=body, name="rayloader-reader", daemon=True).start()


def _scheme(catalog: Catalog | None) -> str:
    """What serves the catalog; readers that are told later what to read are ready for anything."""
    from rayloader.storage.uri import is_object, scheme_of

    if catalog is None:
        return "any"
    return scheme_of(catalog.root).decode() if is_object(catalog.root) else "file"


def _end(status: int) -> NoReturn:
    """End the process at once: a read that hangs in the kernel must not keep it."""
    os._exit(status)


def _cpus_here() -> set[int]:
    """Every CPU that this process may be given."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)
