"""The notebook runs as it stands, in a real kernel, and shows what it says it shows."""

import os
import sys
from pathlib import Path

import pytest

from rayloader.experiment.generate import generate

pytestmark = pytest.mark.slow

nbclient = pytest.importorskip("nbclient", reason="executes the notebook")
nbformat = pytest.importorskip("nbformat")
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "scaling.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Its code cells after they have run where data/train is."""
    place = tmp_path_factory.mktemp("notebook")
    generate(place / "data" / "train", 120, 5000)
    notebook = nbformat.read(NOTEBOOK, 4)
    path = os.environ.get("PYTHONPATH")
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{path}" if path else str(ROOT)}
    client = nbclient.NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": str(place)}}
    )
    client.create_kernel_manager()
    client.km.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute(env=environ)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell, kind):
    """What a cell shows of a kind, all outputs together."""
    data = [output.data.get(kind, "") for output in cell.outputs if "data" in output]
    return "".join(data)


@pytest.mark.timeout(150)
def test_reports_are_tables_and_the_picture_is_a_picture(executed):
    opened, first, scaled, changed, swept, drawn, _ = executed
    assert "Fleet: 1 rank" in shown(opened, "text/html")
    assert "epoch 0: 120 files" in shown(first, "text/html")
    assert "limit: " in shown(first, "text/html")
    assert "epoch 1: 120 files" in shown(scaled, "text/html")
    assert "epoch 2: 120 files" in shown(changed, "text/html")
    assert "2 ranks became 1 after" in shown(changed, "text/html")
    assert "files_per_second" in shown(swept, "text/plain")
    assert len(shown(drawn, "image/png")) > 10_000


def test_nothing_is_written_to_standard_error_and_no_widget_is_shown(executed):
    for cell in executed:
        for output in cell.outputs:
            assert output.output_type != "stream" or output.name != "stderr", output.text
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


def test_it_is_kept_without_outputs():
    cells = nbformat.read(NOTEBOOK, 4).cells
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)
