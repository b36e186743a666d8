"""Kill the reader at random moments, many times, and count what that costs.

::

    python -m tests.faults.campaign --kills 1000 --seed 1

Each *life* is one data set with random options. Its trainer reads some epochs, leaves some of them
early, changes the concurrency and holds batches for a random time, while the reader is struck:
SIGKILL, SIGSTOP, or a word on its socket that it cannot understand (an exception inside). Between
epochs some files change, and their sizes with them. The stream is compared, sample by sample and
byte by byte, with the one that the plan's arithmetic gives without any reader.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import gc
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time

import numpy as np
import psutil

import rayloader
from rayloader.plan import EpochPlan, Shard

FILES = 97
PART_BYTES = 8192
HANGS_AFTER = 60
"""A ``next()`` that takes longer hangs [s]; a restart takes one or two."""


def content(number, version=0):
    """A file's bytes: unlike any other's, from none to some parts long."""
    length = ((number + 13 * version) * 7919) % 30_000 if (number + version) % 11 else 0
    return np.random.default_rng([number, version]).bytes(length)


def make_files(directory):
    for number in range(FILES):
        write_file(directory, number, 0)


def write_file(directory, number, version, replace=False):
    """Write a version of a file, in place or as a new file of that name."""
    path = os.path.join(directory, f"{number:03}.bin")
    with open(path + ".new" if replace else path, "wb") as file:
        file.write(content(number, version))
    if replace:
        os.rename(path + ".new", path)


@dataclasses.dataclass
class Tally:
    """What a campaign did and what came of it."""

    kills: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lives: int = 0
    epochs: int = 0
    left: int = 0
    changes: int = 0
    samples: int = 0
    restarts: int = 0
    held: int = 0
    lost: int = 0
    repeated: int = 0
    hung: int = 0
    disordered: int = 0
    overwritten: int = 0
    failed: list = dataclasses.field(default_factory=list)

    @property
    def clean(self):
        return not (self.lost or self.repeated or self.hung or self.disordered
                    or self.overwritten or self.failed)  # fmt: skip

    def __str__(self):
        blows = ", ".join(f"{name} {count}" for name, count in sorted(self.kills.items()))
        lines = [
            f"{self.kills.total()} kills ({blows}), {self.restarts} restarts, {self.lives} data "
            f"sets, {self.epochs} epochs ({self.left} left early), {self.samples} samples, "
            f"{self.held} batches held, {self.changes} files changed",
            f"lost, repeated, hung: {self.lost}, {self.repeated}, {self.hung}",
            f"out of order, overwritten, failed: {self.disordered}, {self.overwritten}, "
            f"{len(self.failed)}",
        ]
        return "\n".join([*lines, *self.failed])


class Hung(BaseException):
    """Raised by the watch; no ``except Exception`` stops it."""


class Watch:
    """Raises :class:`Hung` in the main thread when a block takes longer than it may."""

    def __enter__(self):
        self._deadline = float("inf")
        self._end = threading.Event()
        self._before = signal.signal(signal.SIGUSR1, self._ring)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)

    @contextlib.contextmanager
    def over(self, seconds):
        """The block may take so long [s]."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = float("inf")

    def _look(self):
        while not self._end.wait(0.5):
            if time.monotonic() > self._deadline:
                self._deadline = float("inf")
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def _ring(self, *_):
        faulthandler.dump_traceback(all_threads=True)
        raise Hung("no progress")


class Assassin:
    """Strikes the reader of one data set, now or a little later in another thread."""

    def __init__(self, dataset, random, tally, kills):
        self.dataset, self.random, self.tally, self.kills = dataset, random, tally, kills
        self.threads = []

    @property
    def left(self):
        return self.kills - self.tally.kills.total()

    def strike(self, delay):
        blow = self.random.choice(["SIGKILL", "SIGSTOP", "exception"])
        if delay == 0:
            self._now(blow)
        else:
            thread = threading.Timer(delay, self._now, [blow])
            thread.start()
            self.threads.append(thread)

    def rest(self):
        for thread in self.threads:
            thread.join()
        self.threads.clear()

    def _now(self, blow):
        remote = self.dataset._loader._remote
        channel = remote._owned.channel if remote is not None else None
        if channel is None or self.left <= 0:
            return
        if blow == "exception" and channel.name == "local":
            with contextlib.suppress(OSError):
                channel._connection.send(b"?" * self.random.randrange(1, 100), 0x4040)
                self.tally.kills[blow] += 1
            return
        number = signal.SIGSTOP if blow == "SIGSTOP" else signal.SIGKILL
        pid = channel.welcome["pid"]
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if psutil.Process(pid).status() not in ("zombie", "stopped"):
                os.kill(pid, number)
                self.tally.kills[number.name] += 1


class Life:
    """One data set with random options, from its opening to its end."""

    def __init__(self, directory, random, tally, kills, watch, versions):
        self.random, self.tally, self.watch = random, tally, watch
        self.directory, self.versions = directory, versions
        choose = random.choice
        world = choose([1, 1, 2, 3])
        self.options = {
            "batch_size": random.randrange(1, 8),
            "seed": random.randrange(1000),
            "shuffle": choose([True, True, False]),
            "uneven": choose(["drop", "pad"]),
            "drop_last": choose([True, False]),
            "ordered": choose([True, True, False]),
            "channel": choose(["local", "local", "local", "ray"]),
            "memory_bytes": choose([1 << 20, 2 << 20, 64 << 20]),
            "read_ahead_batches": choose([None, 1, 2, 5]),
            "concurrency": choose([1, 4, 64]),
            "direct": choose([False, False, "fallback"]),
            "engine": choose(["native", "native", "python"]),
            "part_bytes": PART_BYTES,
            "max_restarts": 8,
        }
        self.shard = Shard(random.randrange(world), world)
        source = choose([directory, rayloader.Catalog.from_source(directory, stat=True)])
        self.dataset = rayloader.RankDataset(
            source, rank=self.shard.rank, world_size=world, **self.options
        )
        self.assassin = Assassin(self.dataset, random, tally, kills)
        self.held = []
        self.unfinished = None

    def live(self, epochs):
        with self.dataset:
            for _ in range(epochs):
                if self.assassin.left <= 0:
                    break
                self.epoch(self.random.randrange(100))
                if self.random.random() < 0.3:
                    self.change_files()
            self.assassin.rest()
        while self.held:
            self.let_go()

    def expected(self, epoch):
        """Batches of file numbers, as the plan's arithmetic gives them."""
        options = self.options
        plan = EpochPlan(
            FILES, self.shard, options["batch_size"], epoch, options["seed"], options["shuffle"],
            options["uneven"], options["drop_last"],
        )  # fmt: skip
        return [entries.tolist() for entries in plan.batches()]

    def epoch(self, number):
        expected = self.expected(number)
        random, tally = self.random, self.tally
        strikes = {random.randrange(-1, len(expected) + 1) for _ in range(random.randrange(1, 5))}
        if -1 in strikes:  # between two epochs
            self.assassin.strike(0)
        leave = random.randrange(len(expected)) if random.random() < 0.2 else None
        self.dataset.set_epoch(number)
        batches, got = iter(self.dataset), []
        while len(got) != leave:
            if len(got) in strikes:
                strikes.discard(len(got))
                self.assassin.strike(random.choice([0, 0, 0.001, 0.01, 0.1, 1.0]))
            if random.random() < 0.05:
                self.dataset.concurrency = random.choice([1, 4, 64])
            with self.watch.over(HANGS_AFTER):
                batch = next(batches, None)
            if batch is None:
                break
            got.append(self.look_at(batch))
        tally.restarts += self.dataset.receipt.restarts
        if leave is not None:
            tally.left += 1
            if not self.options["ordered"]:  # which batches come first is the storage's choice
                got, expected = sorted(got), sorted(expected)
                expected = [batch for batch in expected if batch in got]
            expected = expected[: len(got)]
        self.judge(expected, got)
        if random.random() < 0.5:
            self.unfinished = batches  # else it is dropped at once

    def look_at(self, batch):
        """Check its bytes; keep it or let it go. The numbers of its files."""
        numbers = [int(key[:3]) for key in batch.keys]
        contents = [content(number, self.versions[number]) for number in numbers]
        self.compare(batch, contents)
        if self.random.random() < 0.3:
            self.held.append((batch, contents))
            self.tally.held += 1
        while sum(batch.nbytes for batch, _ in self.held) > self.options["memory_bytes"] // 4 or (
            self.held and self.random.random() < 0.2
        ):
            self.let_go()
        return numbers

    def let_go(self):
        self.compare(*self.held.pop(self.random.randrange(len(self.held))))

    def compare(self, batch, contents):
        self.tally.overwritten += sum(
            sample.numpy().tobytes() != expected
            for sample, expected in zip(batch, contents, strict=True)
        )

    def change_files(self):
        for number in self.random.sample(range(FILES), self.random.choice([1, 5, FILES])):
            self.versions[number] += 1
            self.tally.changes += 1
            replace = self.random.random() < 0.5
            write_file(self.directory, number, self.versions[number], replace)

    def judge(self, expected, got):
        tally = self.tally
        wanted = collections.Counter(number for batch in expected for number in batch)
        arrived = collections.Counter(number for batch in got for number in batch)
        tally.lost += (wanted - arrived).total()
        tally.repeated += (arrived - wanted).total()
        if not self.options["ordered"]:
            expected, got = sorted(expected), sorted(got)
        tally.disordered += expected != got
        tally.epochs += 1
        tally.samples += arrived.total()


def run(kills, seed, directory, *, every=None):
    """Kill the reader so many times; the tally. ``every`` [s]: report progress."""
    tally, reported, versions = Tally(), time.monotonic(), [0] * FILES
    with Watch() as watch:
        while tally.kills.total() < kills:
            chance = random.Random(f"{seed}/{tally.lives}")
            life = Life(directory, chance, tally, kills, watch, versions)
            _survive(life, f"life {tally.lives} of seed {seed}", tally)
            tally.lives += 1
            if every is not None and time.monotonic() - reported > every:
                print(tally, flush=True)
                reported = time.monotonic()
    make_files(directory)
    return tally


def _survive(life, name, tally):
    try:
        life.live(life.random.randrange(1, 8))
    except Hung:
        tally.hung += 1
        tally.failed.append(f"{name} hung: {life.options}")
    except Exception as error:
        tally.failed.append(f"{name}: {error!r}: {life.options}")
        logging.exception(name)
    finally:
        life.assassin.rest()
        life.dataset.close()


def promised(seconds):
    """The promise [s], stretched on a machine that has more to do than it can."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def many_data_sets(directory, times, seconds):
    """Open data sets one after the other, read of each a little, nothing or all, and close it.

    Raises:
        AssertionError: this process is not what it was within so many seconds, or a reader lives.
    """
    _open_and_close(directory, 3)
    before = _around([])
    memory = psutil.Process().memory_info().rss
    readers = _open_and_close(directory, times)
    closed = time.monotonic()
    assert len(set(readers)) == times
    while any(now > before[name] for name, now in _around(readers).items()):
        assert time.monotonic() - closed < seconds, f"{before} was before, {_around(readers)} after"
        time.sleep(0.02)
    assert psutil.Process().memory_info().rss < memory + (32 << 20)


def _open_and_close(directory, times):
    """The readers; a process id alone may come again."""
    readers = []
    for turn in range(times):
        with rayloader.RankDataset(directory, batch_size=5, rank=0, world_size=1) as dataset:
            for _ in itertools.islice(dataset, (0, 1, None)[turn % 3]):
                pass
            readers.append(psutil.Process(dataset._loader._remote.welcome["pid"]))
    return readers


def _around(readers):
    """What there is of this process and of these readers."""
    gc.collect()
    with open("/proc/self/maps", "rb") as file:
        maps = file.read()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "arenas": maps.count(b"rayloader-arena"),
        "readers": sum(reader.is_running() for reader in readers),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-sets", type=int, help="open and close so many, and kill nothing")
    arguments = parser.parse_args()
    logging.getLogger("rayloader").setLevel(logging.ERROR)
    directory = tempfile.mkdtemp()
    try:
        make_files(directory)
        if arguments.data_sets:
            many_data_sets(directory, arguments.data_sets, 2.0)
            print(f"{arguments.data_sets} data sets opened and closed: all is as before")
            return
        tally = run(arguments.kills, arguments.seed, directory, every=60)
    finally:
        shutil.rmtree(directory)
    print(tally)
    sys.exit(0 if tally.clean else 1)


if __name__ == "__main__":
    main()
