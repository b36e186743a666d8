"""rayloader: persistent Ray readers, one per rank, that take a new file list every epoch.

Public names are loaded on first use; importing this package loads neither ray nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rayloader.errors import *  # noqa: F403
from rayloader.errors import __all__ as _errors

if TYPE_CHECKING:
    from rayloader.catalog import Catalog
    from rayloader.cluster import shutdown
    from rayloader.config import Options
    from rayloader.dataset import Batch, RankDataset
    from rayloader.experiment.plot import plot
    from rayloader.fleet.fleet import Fleet
    from rayloader.launch import Launch

__version__ = "0.1.0"

_HOME = {
    "Batch": "rayloader.dataset",
    "Catalog": "rayloader.catalog",
    "Fleet": "rayloader.fleet.fleet",
    "Launch": "rayloader.launch",
    "Options": "rayloader.config",
    "RankDataset": "rayloader.dataset",
    "plot": "rayloader.experiment.plot",
    "shutdown": "rayloader.cluster",
}

__all__ = [
    "Batch",
    "Catalog",
    "Fleet",
    "Launch",
    "Options",
    "RankDataset",
    "plot",
    "shutdown",
    *_errors,
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
