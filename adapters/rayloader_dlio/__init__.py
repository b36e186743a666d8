"""DLIO reads through rayloader.

In a workload file of DLIO (2.0.0, argonne-lcf main, or mlcommons' fork)::

    reader:
      data_loader: pytorch
      data_loader_classname: rayloader_dlio.RayDataLoader
      data_loader_sampler: iterative

and the same ``mpirun`` or ``srun`` line as before. Rank 0 says that it is in use, in one line.

===============  ================================================================
``settings``     what DLIO's arguments, the workload file and the environment ask for
``assignment``   which files DLIO gave to this rank for an epoch, and how many steps
``ranks``        agreement between the ranks over MPI; what those of a node share
``session``      one reader per rank, for as long as DLIO runs; the end of everything
``kernel``       what the kernel knows: file system, devices, page cache, CPU times
``records``      one record per rank and epoch, beside DLIO's output
``loader``       DLIO's interface (the only module that imports DLIO)
===============  ================================================================

Importing this package imports nothing; DLIO's own modules are imported with ``RayDataLoader``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayloader_dlio.loader import RayDataLoader

__all__ = ["RayDataLoader"]


def __getattr__(name: str) -> Any:
    if name != "RayDataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from rayloader_dlio.loader import RayDataLoader
    except AttributeError as error:
        # DLIO's search swallows this one, and would go on with its own loader.
        raise ImportError(f"rayloader_dlio does not fit this DLIO: {error}") from error
    globals()[name] = RayDataLoader
    return RayDataLoader


def __dir__() -> list[str]:
    # DLIO finds the class by inspect.getmembers, which asks this.
    return sorted({*globals(), *__all__})
