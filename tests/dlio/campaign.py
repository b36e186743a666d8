"""Longer than a test may be: two jobs at once, many times, and many combinations of settings.

    python -m tests.dlio.campaign pairs 20      # two jobs of two ranks at once, 20 times
    python -m tests.dlio.campaign settings 30   # 30 workloads drawn at random, seed after it

Each run must end well, leave nothing, and have read what the witness says that DLIO assigned. The
DLIO is chosen as in harness.py.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.census import Census
from tests.dlio.harness import Dlio
from tests.dlio.truth import KIND, fingerprint, prefix

FORMATS = ("jpeg", "png", "npy", "npz")


def check(finished):
    """Hold a finished run against the witness.

    Raises:
        AssertionError: it does not hold; the message has what the run printed.
    """
    assert finished.status == 0, finished.said[-6000:]
    assert finished.gone_after is not None, finished.left
    assert finished.receipts, "no records"
    for (part, epoch, rank), record in finished.receipts.items():
        steps = finished.noted(rank, f"end_{KIND[part]}", epoch)["batches"]
        assert record["steps_yielded"] >= steps
        samples = record["steps_yielded"] * record["batch_size"]
        expected = fingerprint(prefix(finished, part, epoch, rank, samples))
        assert record["order_hash"] == expected.order, (part, epoch, rank)
        assert record["bytes_before_clock"] == record["metadata_ops_before_clock"] == 0
    for rank, notes in finished.witness.items():
        for note in notes:
            if note["event"] == "end_train":
                others = finished.noted(0, "end_train", note["epoch"])["batches"]
                assert note["batches"] == others, (rank, note["epoch"])


def place(census, number):
    """A new place for workloads."""
    return Dlio(Path(tempfile.mkdtemp(prefix=f"dlio-{number}-")), census)


def pairs(times):
    """Two jobs at once, ``times`` times."""
    for number in range(times):
        began = time.monotonic()
        censuses = [Census(), Census()]
        try:
            jobs = [place(census, number) for census in censuses]
            for job, form in zip(jobs, ("npy", "png"), strict=True):
                job.files("train", 40, form)
                job.workload(
                    dataset={"format": form, "num_files_train": 40, "record_length": 4000,
                             "record_length_bytes": 4000},
                    reader={"batch_size": 3, "read_threads": 2, "prefetch_size": 2},
                    train={"epochs": 3},
                )  # fmt: skip
            with jobs[0].start(2) as one, jobs[1].start(2) as other:
                for finished in (one.wait(), other.wait()):
                    check(finished)
        finally:
            for census in censuses:
                census.close()
        print(f"pair {number + 1} of {times}: well, {time.monotonic() - began:.0f} s", flush=True)


def settings(times, seed=1):
    """``times`` workloads drawn at random."""
    draw = random.Random(seed)
    for number in range(times):
        form, ranks = draw.choice(FORMATS), draw.choice((1, 2, 2, 3))
        files, samples = draw.randint(40, 90), draw.choice((1, 1, 1, 4))
        drawn = {
            "batch_size": draw.randint(1, 7),
            "batch_size_eval": draw.randint(1, 3),
            "read_threads": draw.choice((0, 1, 2, 4)),
            "prefetch_size": draw.choice((0, 2, 5)),
            "file_shuffle": draw.choice(("off", "seed", "random")),
            "sample_shuffle": draw.choice(("off", "seed", "random")),
        }
        evaluate, total = draw.random() < 0.5, draw.choice((-1, -1, 2))
        subfolders = draw.choice((0, 0, 3))
        what = (
            f"{form}, {ranks} ranks, {files} files of {samples}, {drawn}, eval {evaluate}, {total}"
        )
        census = Census()
        try:
            job = place(census, number)
            job.files("train", files, form, subfolders=subfolders)
            job.files("valid", 13, form, seed=2)
            job.workload(
                workflow={"evaluation": evaluate},
                dataset={"format": form, "num_files_train": files, "num_files_eval": 13,
                         "num_subfolders_train": subfolders, "num_samples_per_file": samples,
                         "record_length": 4000, "record_length_bytes": 4000},
                reader=drawn,
                train={"epochs": 2, "total_training_steps": total,
                       "seed_change_epoch": draw.random() < 0.5},
            )  # fmt: skip
            print(f"{number + 1} of {times}: {what}", flush=True)
            check(job.run(ranks))
        finally:
            census.close()


if __name__ == "__main__":
    {"pairs": pairs, "settings": settings}[sys.argv[1]](*map(int, sys.argv[2:]))
