"""The adapter for DLIO stands on rayloader's public face, and meets DLIO in one place."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rayloader

ADAPTER = Path(__file__).resolve().parents[2] / "adapters" / "rayloader_dlio"
MODULES = [
    "settings", "assignment", "ranks", "kernel", "records", "session", "epoch", "loader",
    "__init__",
]  # fmt: skip
"""Each imports only those before it."""
BESIDE = {"rayloader.receipt", "rayloader.experiment.pagecache"}
"""Modules of rayloader that it uses beside the public names."""


def imports(module):
    """(module, name or None) of everything that a module of the adapter imports."""
    tree = ast.parse((ADAPTER / f"{module}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def test_the_list_has_every_module():
    assert {path.stem for path in ADAPTER.glob("*.py")} == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_only_public_names_are_used(module):
    for source, name in imports(module):
        if source == "rayloader":
            assert name is None or name in rayloader.__all__, name
        elif source.startswith("rayloader."):
            assert source in BESIDE, source


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    before = {f"rayloader_dlio.{name}" for name in MODULES[: MODULES.index(module)]}
    for source, name in imports(module):
        if source == "rayloader_dlio":
            source = f"rayloader_dlio.{name}"
        if source.startswith("rayloader_dlio."):
            assert source in before, source


@pytest.mark.parametrize("module", set(MODULES) - {"loader"})
def test_only_the_loader_knows_dlio_and_mpi(module):
    met = {source.partition(".")[0] for source, _ in imports(module)}
    assert not met & {"dlio_benchmark", "mpi4py"}


def test_the_package_is_found_by_dlio_and_imported_without_anything_heavy():
    code = (
        "import sys, rayloader_dlio\n"
        "assert 'RayDataLoader' in dir(rayloader_dlio)\n"
        "print(sorted({'ray', 'torch', 'numpy', 'dlio_benchmark'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": f"{ADAPTER.parent}:{ADAPTER.parents[1]}"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
