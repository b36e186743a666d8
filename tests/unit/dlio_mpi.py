"""A world of ranks that are threads of this process: what the adapter uses of mpi4py.MPI."""

import threading
from types import SimpleNamespace


class World:
    """``nodes``: ranks on each node."""

    def __init__(self, nodes=(1,)):
        self.size = sum(nodes)
        self.finalized = False
        self.aborted = []
        self._everybody = _Circle(self.size)
        self._places = []
        for count in nodes:
            circle = _Circle(count)
            self._places += [(circle, local) for local in range(count)]

    def mpi(self, rank=0):
        return SimpleNamespace(
            COMM_WORLD=_Comm(self._everybody, rank, self),
            COMM_TYPE_SHARED="shared",
            Is_finalized=lambda: self.finalized,
        )


class _Circle:
    def __init__(self, size):
        self.size = size
        self.said = [None] * size
        self.barrier = threading.Barrier(size)


class _Comm:
    def __init__(self, circle, rank, world):
        self._circle, self.rank, self._world = circle, rank, world
        self._at = rank
        self.size = circle.size

    def allgather(self, value):
        self._circle.said[self.rank] = value
        self._circle.barrier.wait(10)
        heard = list(self._circle.said)
        self._circle.barrier.wait(10)
        return heard

    def bcast(self, value, root=0):
        return self.allgather(value)[root]

    def Dup(self):  # noqa: N802
        return self

    def Split_type(self, kind):  # noqa: N802
        assert kind == "shared"
        circle, local = self._world._places[self._at]
        return _Comm(circle, local, self._world)

    def Free(self):  # noqa: N802
        pass

    def Abort(self, status):  # noqa: N802
        self._world.aborted.append(self.rank)
