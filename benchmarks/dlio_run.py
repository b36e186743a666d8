"""One run of DLIO under ``mpirun``, and what was measured in it.

Method: DLIO runs with the command that its users type. Its own results are read from
``summary.json``; moments and CPU times are taken inside rank 0 by dlio_hook/sitecustomize.py, on
the machine's monotonic clock: an epoch's wall time runs from DLIO's ``start_train`` to its
``end_train``, the gap from the last batch dealt with to the first of the next epoch. CPU is that of
all processes of the run, workers that have ended included, from the first ``start_train`` to the
last ``end_train``, over the bytes that the steps read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contender import ContenderFailed

HERE = Path(__file__).resolve().parent
HOOK = HERE / "dlio_hook"
ADAPTER = "rayloader_dlio.RayDataLoader"
PATIENCE = 900.0
"""A run that takes longer hangs [s]."""


@dataclasses.dataclass(frozen=True)
class Dlio:
    """One DLIO to measure with.

    Attributes:
        name: for tables.
        python: an interpreter that has what it needs, and rayloader.
        checkout: of its sources; ``None``: installed in that interpreter.
    """

    name: str
    python: str
    checkout: str | None = None

    @property
    def mpirun(self) -> str:
        """Of the MPI beside the interpreter, or on PATH."""
        beside = Path(self.python).parent / "mpirun"
        found = str(beside) if beside.exists() else shutil.which("mpirun")
        if found is None:
            raise SystemExit(f"no mpirun beside {self.python}, and none on PATH")
        return found


@dataclasses.dataclass(frozen=True)
class Case:
    """The conditions that all loaders of one table have.

    Attributes:
        name: of the case.
        data: DLIO's data folder, with ``train`` in it.
        files: in it [files].
        size: of each [bytes].
        form: DLIO's format.
        ranks: of MPI.
        batch: samples per step and rank.
        epochs: in a run.
        compute: DLIO's computation per step [s].
        cold: the page cache is dropped before each epoch.
    """

    name: str
    data: Path
    files: int
    size: int
    form: str = "jpeg"
    ranks: int = 2
    batch: int = 24
    epochs: int = 3
    compute: float = 0.001
    cold: bool = False

    @property
    def steps(self) -> int:
        """Of each rank in an epoch."""
        return self.files // self.ranks // self.batch

    @property
    def bytes(self) -> int:
        """Read by all steps of a run [bytes]."""
        return self.steps * self.batch * self.ranks * self.size * self.epochs


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run gave.

    Attributes:
        samples_per_second: all ranks, by the wall clock; median of the epochs.
        dlio_samples_per_second: DLIO's own metric.
        utilisation: DLIO's own AU [%].
        gap: between epochs, median [s].
        cpu_per_gigabyte: of all processes [s/GB].
        steps: that each epoch took.
        said: the end of what the run printed.
    """

    samples_per_second: float
    dlio_samples_per_second: float
    utilisation: float
    gap: float
    cpu_per_gigabyte: float
    steps: list[int]
    said: str

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value for name, value in vars(self).items() if name != "said"}


def run(dlio: Dlio, case: Case, place: Path, reader: Mapping[str, Any], remedy: str) -> Measured:
    """Run one case once.

    Args:
        dlio: which DLIO.
        case: the conditions.
        place: a folder for this run.
        reader: the section ``reader`` of the workload file, but for the batch size.
        remedy: of dlio_hook; empty: none.

    Raises:
        ContenderFailed: it ended badly, or took another number of steps.
    """
    shutil.rmtree(place, ignore_errors=True)
    (place / "conf" / "workload").mkdir(parents=True)
    workload = _workload(dlio, case, reader)
    (place / "conf" / "workload" / "bench.yaml").write_text(json.dumps(workload))  # JSON is YAML
    said = _launch(dlio, case, place, remedy)
    notes = [json.loads(line) for line in (place / "notes").read_text().splitlines()]
    summary = json.loads((place / "out" / "summary.json").read_text())
    return _measured(case, notes, summary["metric"], said)


def _workload(dlio: Dlio, case: Case, reader: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": {"name": "bench"} if dlio.checkout else "bench",
        "framework": "pytorch",
        "workflow": {"generate_data": False, "train": True, "checkpoint": False},
        "dataset": {
            "data_folder": str(case.data),
            "format": case.form,
            "num_files_train": case.files,
            "num_samples_per_file": 1,
            "record_length": case.size,
            "record_length_bytes": case.size,
        },
        "reader": {
            "data_loader": "pytorch",
            "batch_size": case.batch,
            "file_shuffle": "seed",
            "sample_shuffle": "seed",
            **reader,
        },
        "train": {"epochs": case.epochs, "computation_time": case.compute},
    }


def _launch(dlio: Dlio, case: Case, place: Path, remedy: str) -> str:
    command = [
        dlio.mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(case.ranks),
        dlio.python, "-m", "dlio_benchmark.main", f"--config-dir={place / 'conf'}",
        f"hydra.run.dir={place / 'hydra'}", "workload=bench",
        f"++workload.output.folder={place / 'out'}",
    ]  # fmt: skip
    repository = HERE.parent
    path = [HOOK, *filter(None, [dlio.checkout]), repository, repository / "adapters"]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAYLOADER_")},
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "BENCH_DLIO_RUN": secrets.token_hex(8),
        "BENCH_DLIO_NOTES": str(place / "notes"),
        "BENCH_DLIO_COLD": "1" if case.cold else "",
        "BENCH_DLIO_REMEDY": remedy,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    log = place / "log"
    with log.open("w") as output:
        started = subprocess.Popen(
            command, cwd=place, env=environ, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = started.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGTERM)
                started.wait(30)
    said = log.read_text(errors="replace")
    # In-process, mlcommons' fork leaves MPI without a word after a run that is complete.
    if status != 0 and not (place / "out" / "summary.json").exists():
        raise ContenderFailed(f"{' '.join(command)}: status {status}\n{said[-3000:]}")
    return said


def _measured(
    case: Case, notes: Sequence[Mapping[str, Any]], metric: Mapping[str, Any], said: str
) -> Measured:
    starts = [note for note in notes if note["event"] == "start_train"]
    ends = [note for note in notes if note["event"] == "end_train"]
    steps = [end["steps"] for end in ends]
    if not starts or len(starts) != len(ends) or min(steps) < case.steps * 0.95:
        raise ContenderFailed(f"took {steps} steps, and not {case.steps}\n{said[-3000:]}")
    samples = case.batch * case.ranks
    rates = [
        end["steps"] * samples / (end["at"] - start["at"])
        for start, end in zip(starts, ends, strict=True)
    ]
    gaps = [after["first"] - before["last"] for before, after in itertools.pairwise(ends)]
    cpu = ends[-1]["cpu"] - starts[0]["cpu"]
    return Measured(
        samples_per_second=statistics.median(rates),
        dlio_samples_per_second=float(metric["train_throughput_mean_samples_per_second"]),
        utilisation=float(metric["train_au_mean_percentage"]),
        gap=statistics.median(gaps) if gaps else 0.0,
        cpu_per_gigabyte=cpu / (sum(steps) * samples * case.size / 1e9),
        steps=steps,
        said=said,
    )
