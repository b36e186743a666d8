"""The ranks of one DLIO run: what they agree on over MPI, and what those of a node share."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import secrets
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from rayloader import Launch, RayloaderError, UsageError


class ExitWatch:
    """Ends all ranks if this one exits before there is a session, which then sees to that.

    Between these two DLIO checks its arguments and deals out its files. A rank that fails there
    would leave the others at a barrier for ever.
    """

    def __init__(self, mpi: Any) -> None:
        """Watch from now on.

        Args:
            mpi: the module ``mpi4py.MPI``.
        """
        self._mpi = mpi
        self._pid = os.getpid()
        atexit.register(self.at_exit)

    def end(self) -> None:
        """There is a session, or all ranks have agreed that there is none."""
        atexit.unregister(self.at_exit)

    def at_exit(self) -> None:
        """The interpreter ends."""
        mpi = self._mpi
        if os.getpid() != self._pid or not mpi.Is_initialized() or mpi.Is_finalized():
            return
        if mpi.COMM_WORLD.size > 1:
            _tell_early_exit(mpi.COMM_WORLD)
            mpi.COMM_WORLD.Abort(1)


def _tell_early_exit(world: Any) -> None:
    sys.stderr.write(
        f"rayloader: rank {world.rank} exits before the run's end, for the error above; it ends "
        f"all {world.size} ranks\n"
    )
    sys.stderr.flush()


class Ranks:
    """All ranks of the run. Every method but :meth:`abort` is called by all of them together."""

    def __init__(self, mpi: Any) -> None:
        """Speak over a copy of the world, so that DLIO's own messages are not disturbed.

        Args:
            mpi: the module ``mpi4py.MPI``, initialised.
        """
        self._mpi = mpi
        self._world = comm = mpi.COMM_WORLD
        self._comm = comm.Dup()
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.run: str = self.from_first(secrets.token_hex(16))
        """What the run's ranks find each other by; nobody else can know it."""
        self.name: str = self.from_first(secrets.token_hex(8))
        """The run's name in records and metrics, which opens nothing."""
        self.launch = self._find_place()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails here on one rank fails on all, with the same error: nobody waits for ever.

        Raises:
            Exception: this rank's error, or that of the lowest rank that has one.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        told = self._comm.allgather(None if mine is None else _packed(mine, self.rank))
        first = next((rank for rank, packed in enumerate(told) if packed is not None), None)
        if first is None:
            return
        if mine is not None and first == self.rank:
            raise mine
        raise pickle.loads(told[first])

    def least(self, *values: int) -> list[int]:
        """The least of each value over all ranks."""
        return [min(column) for column in zip(*self._comm.allgather(values), strict=True)]

    def total(self, value: int) -> int:
        """The sum over all ranks."""
        return sum(self._comm.allgather(value))

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""
        return self._comm.bcast(value, root=0)

    def abort(self, error: BaseException) -> None:
        """Say what has happened and end all ranks now; with one rank only, return.

        MPI's Abort runs no exit handlers anywhere: what was started ends by its life lines.
        """
        if self.size == 1:
            return
        lines = [f"rayloader: rank {self.rank} ends all {self.size} ranks: {error}"]
        if isinstance(error, RayloaderError):  # its first line is complete in itself
            lines += [f"  {note}" for note in getattr(error, "__notes__", [])]
        else:
            lines = [*traceback.format_exception(error), *lines]
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        self._world.Abort(1)

    def abort_at_exit(self) -> None:
        """End all ranks if this one exits while the others still expect it at a barrier."""
        if self.size == 1 or self._mpi.Is_finalized():
            return
        _tell_early_exit(self._world)
        self._world.Abort(1)

    def _find_place(self) -> Launch:
        """This rank's place: its node's ranks are those that share memory with it, as MPI says."""
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        first = node.bcast(self.rank, root=0)
        masks = node.allgather(sorted(os.sched_getaffinity(0)))
        place = Launch(
            rank=self.rank,
            world_size=self.size,
            local_rank=node.rank,
            local_world_size=node.size,
            run_id=f"dlio:{self.run}:{first}",  # a node is an island, also where two share a host
            launcher="dlio",
            run_name=f"dlio {self.name}",
            node_cpus=tuple(sorted({cpu for mask in masks for cpu in mask})),
        )
        node.Free()
        return place


def _packed(error: Exception, rank: int) -> bytes:
    """An error that travels to the other ranks, with a note whose it is."""
    try:
        travels = pickle.loads(pickle.dumps(error))
    except Exception:  # an error that does not pickle still has words
        travels = UsageError(f"{type(error).__name__}: {error}")
    if isinstance(travels, RayloaderError):
        travels.add_note(f"(of rank {rank})")
    return pickle.dumps(travels)
