"""Runs DLIO as its users do, under ``mpirun``, and keeps what came of it.

Which DLIO: the one installed in ``.venv-dlio`` (``make test`` installs it), or a checkout:

    RAYLOADER_DLIO=path/to/checkout [RAYLOADER_DLIO_PYTHON=python] python -m pytest tests/dlio

``RAYLOADER_DLIO_PYTHON`` is an interpreter that has what that DLIO needs, and what rayloader needs;
``mpirun`` is taken from beside it, or from PATH.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.census import MARK, Census
from tests.dlio.opens import Opens

ROOT = Path(__file__).resolve().parents[2]
WITNESS = Path(__file__).resolve().parent / "witness"
ADAPTER = "rayloader_dlio.RayDataLoader"
RECEIPTS = "rayloader_receipts_*.jsonl"
LIMIT = 400.0
"""A run that takes longer hangs [s]."""
TORCHS_OWN = "torchinductor_"
"""A directory that torch leaves in TMPDIR."""
NEEDS = {
    "2.0.0": "needs PyPI's DLIO 2.0.0: no RAYLOADER_DLIO",
    "fork": "needs mlcommons' fork: RAYLOADER_DLIO=a checkout of mlcommons/DLIO_local_changes",
    "argonne": "needs argonne's DLIO 3: RAYLOADER_DLIO=a checkout of argonne-lcf/dlio_benchmark",
}
"""What a test says that is skipped for want of its DLIO."""
MPIRUN = ("--allow-run-as-root", "--oversubscribe")


@dataclasses.dataclass(frozen=True)
class Installation:
    """One DLIO.

    Attributes:
        python: an interpreter that has all it needs.
        mpirun: of the MPI which that interpreter's mpi4py uses.
        checkout: of its sources; ``None``: the installed one.
    """

    python: str
    mpirun: str
    checkout: str | None

    @property
    def path(self) -> list[str]:
        """What PYTHONPATH must have for it and for rayloader."""
        ours = [str(ROOT), str(ROOT / "adapters")]
        return [self.checkout, *ours] if self.checkout else ours

    @property
    def kind(self) -> str:
        """See :func:`kind_of`."""
        return kind_of(self.checkout)

    @property
    def is_release_2_0_0(self) -> bool:
        """Whether it is PyPI's, whose lists differ from those of its successors."""
        return self.kind == "2.0.0"

    @property
    def is_fork(self) -> bool:
        """Whether each rank keeps its own share of the files, and they move at each epoch."""
        return self.kind == "fork"


@functools.cache
def kind_of(checkout: str | None) -> str:
    """``2.0.0``, ``argonne`` or ``fork``."""
    if not checkout:
        return "2.0.0"
    config = Path(checkout, "dlio_benchmark", "utils", "config.py")
    return "fork" if "files_pre_sharded" in config.read_text(encoding="utf-8") else "argonne"


def installation() -> Installation:
    """The DLIO under test.

    Raises:
        AssertionError: there is none; the message says what to run.
    """
    checkout = os.environ.get("RAYLOADER_DLIO")
    python = os.environ.get("RAYLOADER_DLIO_PYTHON") or str(ROOT / ".venv-dlio/bin/python")
    assert shutil.which(python), (
        f"no DLIO to test with: there is no {python}; run 'make test', which installs one, or set "
        f"RAYLOADER_DLIO_PYTHON to an interpreter that has DLIO and rayloader"
    )
    if checkout:
        there = Path(checkout, "dlio_benchmark", "main.py")
        assert there.exists(), f"RAYLOADER_DLIO={checkout} is no checkout of DLIO: no {there}"
    beside = Path(python).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    assert mpirun, f"no mpirun beside {python} and none on PATH"
    return Installation(python, mpirun, checkout and str(Path(checkout).resolve()))


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a run left behind.

    Attributes:
        status: of mpirun.
        said: standard output and standard error of all ranks, interleaved.
        seconds: it took [s].
        data: where the files lie.
        folder: DLIO's output folder.
        witness: rank → what the witness noted there, in order.
        processes: who was alive, by epoch and moment.
        made: every process that Python code of the run made: (moment [s], event, what).
        opens: which files were opened, in which order.
        left: processes and temporary files that were there after the run.
        gone_after: seconds from the end of mpirun until nothing was left [s]; ``None``: something
            stayed.
    """

    status: int
    said: str
    seconds: float
    data: Path
    folder: Path
    witness: Mapping[int, list[dict]]
    processes: list[dict]
    made: list[dict]
    opens: Opens
    left: list[str]
    gone_after: float | None

    def noted(self, rank, event, epoch):
        """The one note of this event on this rank in this epoch."""
        (one,) = (
            note for note in self.witness[rank] if note["event"] == event and note["epoch"] == epoch
        )
        return one

    def span(self, part, epoch, *ranks):
        """(first, last) place in ``opens`` of an epoch: from the first start to the last end.

        No rank waits for another between two epochs: one may be ahead, and spans overlap.
        """
        kind = {"train": "train", "valid": "eval"}[part]
        marks = self.folder.parent / "notes" / "marks"
        starts, ends = (
            [self.opens.place(str(marks / f"{event}_{kind}-{epoch}-{rank}")) for rank in ranks]
            for event in ("start", "end")
        )
        return min(starts), max(ends)

    def opened(self, part, first=0, last=None):
        """The data files opened between two places."""
        return self.opens.below(f"{self.data}/{part}/", first, last)

    def size(self, path):
        """Of a file [bytes]."""
        return os.stat(path).st_size

    @functools.cached_property
    def summary(self):
        """DLIO's own result."""
        return json.loads((self.folder / "summary.json").read_text())

    @functools.cached_property
    def receipts(self):
        """The adapter's records, by (train or valid, epoch, rank)."""
        records = [
            json.loads(line)
            for path in sorted(self.folder.glob(RECEIPTS))
            for line in path.read_text().splitlines()
        ]
        return {(one["part"], one["epoch"], one["rank"]): one for one in records}


class Dlio:
    """A place where one workload runs."""

    def __init__(self, place: Path, census: Census, dlio: Installation | None = None):
        self.place = place
        self.census = census
        self.dlio = dlio or installation()
        self.data = place / "data"
        for kind in ("train", "valid"):  # DLIO lists both, with or without evaluation
            (self.data / kind).mkdir(parents=True)
        self._runs = 0

    def files(self, kind, count, form, sizes=(2_000, 6_000), subfolders=0, seed=1):
        """Make ``count`` files of random bytes where DLIO looks for them."""
        draw, digits = random.Random(seed), len(str(count))
        for at in range(count):
            folder = self.data / kind / (str(at % subfolders) if subfolders else "")
            folder.mkdir(parents=True, exist_ok=True)
            name = f"img_{at:0{digits}}_of_{count}.{form}"
            (folder / name).write_bytes(draw.randbytes(draw.randint(*sizes)))

    def workload(self, *, ours=True, storage=None, **sections):
        """Write a workload file.

        Args:
            ours: read through rayloader; False: with DLIO's own loader.
            storage: the section ``storage``.
            **sections: merged into the defaults, section by section.
        """
        sampler = {"data_loader_classname": ADAPTER, "data_loader_sampler": "iterative"}
        content = {
            "model": "small" if self.dlio.is_release_2_0_0 else {"name": "small"},
            "framework": "pytorch",
            "workflow": {"generate_data": False, "train": True},
            "dataset": {"data_folder": str(self.data), "num_samples_per_file": 1},
            "reader": {"data_loader": "pytorch", **(sampler if ours else {})},
            "train": {"epochs": 1, "computation_time": 0.001},
            "output": {"folder": str(self.place / "out")},
        }
        if storage:
            content["storage"] = storage
        for section, values in sections.items():
            content.setdefault(section, {}).update(values)
        folder = self.place / "conf" / "workload"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "under_test.yaml").write_text(yaml.safe_dump(content))

    def start(self, ranks, *, prefix=(), mpirun=(), overrides=(), **environ):
        """Begin a run; the result can be waited for."""
        self._runs += 1
        run = self.place / f"run-{self._runs}"
        notes = run / "notes"
        (notes / "marks").mkdir(parents=True)
        folder = run / "out"
        command = [
            *prefix, self.dlio.mpirun, *MPIRUN, "-n", str(ranks), *mpirun,
            self.dlio.python, "-m", "dlio_benchmark.main",
            f"--config-dir={self.place / 'conf'}", f"hydra.run.dir={run / 'hydra'}",
            "workload=under_test", f"++workload.output.folder={folder}", *overrides,
        ]  # fmt: skip
        inside = self.census.environ(
            DLIO_WITNESS=str(notes), PYTHONPATH=os.pathsep.join([str(WITNESS), *self.dlio.path]),
            HYDRA_FULL_ERROR="1", TF_CPP_MIN_LOG_LEVEL="3", MPLCONFIGDIR=_fonts(), **environ,
        )  # fmt: skip
        return Running(self, command, inside, run, Opens(self.data, notes / "marks"))

    def run(self, ranks, *, limit=LIMIT, **words):
        """Run to the end."""
        with self.start(ranks, **words) as running:
            return running.wait(limit)


class Running:
    """A run under way."""

    def __init__(self, dlio, command, environ, run, opens):
        self._dlio, self._run, self._opens = dlio, run, opens
        self._log = run / "log"
        self._mark = f"{MARK}={dlio.census.mark}".encode()
        self._began = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(opens)
        self._popen = subprocess.Popen(
            command, cwd=run, env=environ, stdin=subprocess.DEVNULL,
            stdout=self._stack.enter_context(self._log.open("w")), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(10)
        self._stack.close()

    @property
    def said(self):
        """What all have printed so far."""
        return self._log.read_text(errors="replace")

    def until(self, event, epoch, rank=0, limit=LIMIT):
        """Wait until the witness has noted an event; the note."""
        deadline = time.monotonic() + limit
        while True:
            for note in _lines(self._run / "notes" / f"rank-{rank}.jsonl"):
                if note["event"] == event and note["epoch"] == epoch:
                    return note
            assert self._popen.poll() is None, f"ended before {event} {epoch}:\n{self.said}"
            assert time.monotonic() < deadline, f"no {event} {epoch} in {limit} s:\n{self.said}"
            time.sleep(0.02)

    def wait(self, limit=LIMIT, gone=10.0):
        """Wait for the end of mpirun, then for all that it started."""
        try:
            status = self._popen.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs after {limit} s:\n{self.said[-6000:]}") from None
        seconds = time.monotonic() - self._began
        gone_after = self._gone(gone)
        self._stack.close()
        notes = self._run / "notes"
        return Finished(
            status=status,
            said=self.said,
            seconds=seconds,
            data=self._dlio.data,
            folder=self._run / "out",
            witness={
                int(path.stem.partition("-")[2]): _lines(path)
                for path in sorted(notes.glob("rank-*.jsonl"))
            },
            processes=_lines(notes / "processes.jsonl"),
            made=[one for path in sorted(notes.glob("made-*.jsonl")) for one in _lines(path)],
            opens=self._opens,
            left=self._left(),
            gone_after=gone_after,
        )

    def _left(self):
        """What is still there of the run, but for torch's own directory."""
        return [it for it in self._dlio.census.left() if not it.startswith(TORCHS_OWN)]

    def _gone(self, seconds):
        """Seconds until nothing was left [s]; ``None``: something still is."""
        began = time.monotonic()
        while self._left():
            if time.monotonic() - began > seconds:
                return None
            time.sleep(0.02)
        return time.monotonic() - began


@functools.cache
def _fonts():
    """Where matplotlib, which DLIO's imports bring in, keeps what it takes seconds to find."""
    folder = os.path.join(tempfile.gettempdir(), f"rayloader-tests-{os.getuid()}-fonts")
    os.makedirs(folder, exist_ok=True)
    return folder


def _lines(path):
    """The whole lines of a file of JSON lines that somebody may be writing."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
