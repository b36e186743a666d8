"""Examples, and the Python of the README and of docs/fleet.md, run as they stand."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayloader.experiment.generate import generate
from tests.census import Census

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SNIPPETS = {
    (page, number): snippet
    for page in ("README.md", "docs/fleet.md")
    for number, snippet in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    )
}
TORCHS_OWN = ("torchelastic_", "torchinductor_")
"""Directories that torchrun leaves in TMPDIR."""
FILES, SIZE = 100, 5000
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with data/train below it, as the README has it."""
    place = tmp_path_factory.mktemp("docs")
    generate(place / "data" / "train", FILES, SIZE)
    return place


@pytest.fixture
def run(place):
    """Run a command there; what it prints. Nothing that it starts may be left."""
    census = Census()

    def run(*command):
        environ = census.environ(PYTHONWARNINGS="error::DeprecationWarning:__main__")
        ran = subprocess.run(
            command, cwd=place, env=environ, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        deadline = time.monotonic() + 12
        while left := [it for it in census.left() if not it.startswith(TORCHS_OWN)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        return ran.stdout

    yield run
    census.close()


def test_every_example_is_run_here_and_is_short():
    there = {path.name for path in EXAMPLES.glob("*.py")}
    assert there == {"single_process.py", "stateful_resume.py", "torchrun_two_ranks.py"}
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 50 for name in there)


def test_single_process(run):
    lines = run(sys.executable, EXAMPLES / "single_process.py", "data/train").splitlines()
    assert lines[0] == "5 batches per epoch"
    assert [line.split(",")[0] for line in lines[1:]] == [
        f"epoch {epoch}: {FILES} files" for epoch in range(3)
    ]
    assert all(line.endswith("largest byte 255") for line in lines[1:])


def test_stateful_resume(run):
    said = run(sys.executable, EXAMPLES / "stateful_resume.py", "data/train")
    assert said == f"{FILES} files, each exactly once, in two runs\n"


def test_torchrun_with_two_ranks(run):
    said = run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        EXAMPLES / "torchrun_two_ranks.py", "data/train",
    )  # fmt: skip
    assert said.splitlines() == [f"epoch {epoch}: {FILES} files on 2 ranks" for epoch in range(2)]


def test_both_pages_have_snippets():
    assert {page for page, _ in SNIPPETS} == {"README.md", "docs/fleet.md"}


@pytest.mark.parametrize("which", SNIPPETS, ids="{0[0]} {0[1]}".format)
def test_a_snippet_runs(run, which):
    said = run(sys.executable, "-c", SNIPPETS[which])
    if which == ("README.md", 0):
        assert said == f"{FILES} files, {FILES * SIZE} bytes\n" * 3
