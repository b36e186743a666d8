"""Imports run downward: a room imports rooms before it in this list, and none after it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rayloader.catalog import Catalog

PACKAGE = Path(__file__).resolve().parents[2] / "rayloader"
ROOMS = [
    "errors", "config", "limits", "sockets", "launch", "storage", "catalog", "plan", "arena",
    "tally", "receipt", "checksums", "batches", "reader", "channel", "metrics", "actor", "node",
    "guardian", "head", "cluster", "remote", "position", "epoch", "loader", "dataset",
    "experiment", "fleet", "cli", "testing",
]  # fmt: skip
FOREIGN = {
    "ray": {"channel", "metrics", "head", "cluster", "remote", "dataset", "fleet"},
    "torch": {"dataset", "experiment", "fleet"},
    "click": {"cli"},
    "rich": {"experiment", "fleet", "cli"},
    "s3dlio": {"storage"},
    "obstore": {"storage"},
    "botocore": {"storage"},
}
MODULES = [path for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyi")]


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py").removesuffix(".pyi")


def imported(path):
    """Every module that a file imports anywhere, dotted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_list_has_every_room():
    assert {room(path) for path in MODULES} - {"__init__"} == set(ROOMS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path):
    mine = room(path)
    allowed = {*ROOMS[: ROOMS.index(mine) + 1], "__version__"} if mine in ROOMS else {*ROOMS}
    for name in imported(path):
        top, _, rest = name.partition(".")
        if top == "rayloader" and rest:
            assert rest.split(".")[0] in allowed, f"{mine} imports {name}"
        assert mine in FOREIGN.get(top, {mine}), f"{mine} imports {name}"


def test_the_package_is_imported_without_ray_torch_numpy_and_pyarrow():
    code = (
        "import sys, rayloader\n"
        "print(sorted({'ray', 'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_looking_up_keys_does_not_import_pandas(tmp_path):
    """pyarrow does so by itself where it is installed: 0.3 s of the first batch, 50 MB a reader."""
    code = """
import sys
import numpy as np
from rayloader.catalog import Catalog

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name != "pandas"

sys.meta_path.insert(0, Refuse())
catalog = Catalog.load(sys.argv[1])
assert catalog.sizes.tolist() == [3, 4]
catalog.blob_at(np.arange(2))
catalog.names_at(np.arange(2))
catalog.to_fd()
"""
    for name in ("abc", "abcd"):
        (tmp_path / name).write_bytes(name.encode())
    saved = tmp_path.with_suffix(".arrow")
    Catalog.from_source(tmp_path, stat=True).save(saved)
    ran = subprocess.run([sys.executable, "-c", code, saved], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
