"""Read many epochs over a small data set, and see that nothing grows.

::

    python -m tests.faults.soak --epochs 1000

After each tenth of the epochs, memory, descriptors and threads of the trainer, of its reader and
of Ray's processes are looked at, and the whole arena must be free. The first fifth warms up; from
then on the last value may exceed the first by 2 %, or by what is given as slack where a value is
so small that a page more is 2 %.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import os
import random
import shutil
import sys
import tempfile

import psutil

import rayloader
from rayloader.config import PAGE
from tests.faults import campaign

SHARE = 0.02
SLACK = {"memory": 2 << 20, "descriptors": 2, "threads": 2}
"""A growth below this is none: memory [bytes]. Ray's pools of threads come and go."""
TURNS = 10


def ray_processes(reader):
    """The private Ray that this reader's process belongs to: {kind: process}."""
    raylet = psutil.Process(reader).parent()
    above = raylet.parent()
    family = [raylet, *raylet.children(), *(above.children() if above is not None else [])]
    named = {}
    for process in family:
        with contextlib.suppress(psutil.Error):
            name = os.path.basename(process.name()).partition(":")[0] or "?"
            if process.pid not in (reader, os.getpid()):
                named[f"{name} {process.pid}"] = process
    return named


def look(processes):
    """{(process, what): value}; memory is what belongs to the process alone [bytes]."""
    seen = {}
    for name, process in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            memory = process.memory_full_info()
            seen[name, "memory"] = memory.uss
            seen[name, "descriptors"] = process.num_fds()
            seen[name, "threads"] = process.num_threads()
    return seen


def require_empty_arena(dataset, directory):
    """Read a file that leaves no page of the arena free; a page that is lost would not let it."""
    memory = dataset._loader._remote._owned.memory
    assert memory.held_bytes == 0
    path = os.path.join(directory, "whole")
    with open(path, "wb") as file:
        file.truncate(memory.length - 2 * PAGE)
    dataset.set_epoch(0, files=[path])
    assert [batch.nbytes for batch in dataset] == [memory.length - 2 * PAGE]


def train(dataset, epochs, chance):
    """Epochs as trainings have them: whole ones, some broken off, batches held for a while."""
    held = collections.deque(maxlen=5)
    for epoch in epochs:
        dataset.set_epoch(epoch)
        stop = chance.randrange(1, 20) if chance.random() < 0.1 else None
        for step, batch in enumerate(dataset):
            if chance.random() < 0.2:
                held.append(batch)
            if step == stop:
                break


def soak(directory, epochs, seed=1):
    """Read so many epochs; what was seen at each look: [{(process, what): value}]."""
    chance = random.Random(seed)
    looks = []
    with (
        tempfile.TemporaryDirectory() as elsewhere,
        rayloader.RankDataset(
            directory, batch_size=4, rank=0, world_size=1, memory_bytes=4 << 20
        ) as dataset,
    ):
        train(dataset, range(TURNS), chance)
        processes = {"trainer": psutil.Process()}
        processes["reader"] = psutil.Process(dataset.receipt.reader_pid)
        processes |= ray_processes(dataset.receipt.reader_pid)
        for turn in range(TURNS):
            train(dataset, range(turn * epochs // TURNS, (turn + 1) * epochs // TURNS), chance)
            gc.collect()
            require_empty_arena(dataset, elsewhere)
            looks.append(look(processes))
        assert dataset.receipt.restarts == 0
    return looks


def grown(looks):
    """What has grown: lines that say so."""
    first, last = looks[len(looks) // 5], looks[-1]
    lines = []
    for (process, what), value in sorted(last.items()):
        before = first.get((process, what))
        limit = 0 if before is None else max(before * (1 + SHARE), before + SLACK[what])
        if value > limit:
            every = [one.get((process, what)) for one in looks]
            lines.append(f"{process}: {what} grew from {before} to {value}: {every}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1000)
    arguments = parser.parse_args()
    directory = tempfile.mkdtemp()
    try:
        campaign.make_files(directory)
        looks = soak(directory, arguments.epochs)
    finally:
        shutil.rmtree(directory)
    for (process, what), value in sorted(looks[-1].items()):
        print(f"{process:30} {what:12} {looks[len(looks) // 5].get((process, what))} -> {value}")
    lines = grown(looks)
    print(*lines, sep="\n")
    print(f"{arguments.epochs} epochs: {'nothing grew' if not lines else 'something grew'}")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
