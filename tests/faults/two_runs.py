"""Two runs at once on one machine, many times: neither may notice the other.

::

    python -m tests.faults.two_runs --times 20

Each run has two ranks, which share a private Ray, and reads two epochs of its own files. All four
ranks start at the same moment. Every rank must read its share exactly, in its own run's order; the
two runs must have two Rays; afterwards nothing may be left.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time

from tests.census import Census

FILES = 30
RUNS = ("one", "two")
RANK = """
import sys, rayloader
from rayloader import cluster
with rayloader.RankDataset(sys.argv[1], batch_size=4, seed=5) as dataset:
    for epoch in range(2):
        read = [
            (key, bytes(sample.numpy()).decode()) for batch in dataset
            for key, sample in zip(batch.keys, batch)
        ]
        assert all(content == sys.argv[2] + key for key, content in read), read
        print(*[key for key, _ in read], flush=True)
    assert dataset.receipt.restarts == 0
    print(cluster.connect().address, flush=True)
    sys.stdin.readline()  # until all have read, so that all Rays are there at once
"""


def make_files(directory):
    for run in RUNS:
        os.mkdir(os.path.join(directory, run))
        for number in range(FILES):
            with open(os.path.join(directory, run, f"{number:02}"), "w") as file:
                file.write(f"{run}{number:02}")


def once(directory, seconds=60):
    """Both runs, from their start until nothing is left; how long that took [s].

    Raises:
        AssertionError: something was not as it should be.
    """
    census, began = Census(), time.monotonic()
    try:
        ranks = {(run, rank): _start(census, directory, run, rank)
                 for run in RUNS for rank in range(2)}  # fmt: skip
        said = {name: [rank.line(seconds) for _ in range(3)] for name, rank in ranks.items()}
        for run in RUNS:
            for epoch in range(2):
                shares = [said[run, rank][epoch].split() for rank in range(2)]
                assert sorted(shares[0] + shares[1]) == [f"{n:02}" for n in range(FILES)], shares
        for rank in range(2):
            assert said["one", rank][:2] == said["two", rank][:2], "the same seed, the same order"
        rays = [{said[run, rank][2] for rank in range(2)} for run in RUNS]
        assert [len(ray) for ray in rays] == [1, 1], rays
        assert rays[0] != rays[1], rays
        for rank in ranks.values():
            rank.tell()
        for name, rank in ranks.items():
            assert rank.wait(seconds) == (0, ""), name
        census.gone(10)
    finally:
        census.close()
    return time.monotonic() - began


def _start(census, directory, run, rank):
    environ = {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": run + census.mark, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29512",
    }  # fmt: skip
    return census.start(RANK, os.path.join(directory, run), run, **environ)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    arguments = parser.parse_args()
    directory, failed = tempfile.mkdtemp(), 0
    try:
        make_files(directory)
        for time_ in range(1, arguments.times + 1):
            try:
                print(f"{time_}: {once(directory):.1f} s", flush=True)
            except Exception as error:
                failed += 1
                print(f"{time_}: {type(error).__name__}: {error}", flush=True)
    finally:
        shutil.rmtree(directory)
    print(f"{arguments.times - failed} times out of {arguments.times}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
