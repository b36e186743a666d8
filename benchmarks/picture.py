"""The picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw."""
