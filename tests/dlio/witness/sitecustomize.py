"""A witness inside each rank of DLIO, which knows nothing of the data loader.

Python imports this module at start-up when its directory is on PYTHONPATH, so that DLIO runs with
the command that its users type. It notes, in ``$DLIO_WITNESS/rank-N.jsonl``, what DLIO itself
decided and saw, on the machine's monotonic clock:

- ``assigned``: after each ``reconfigure``, the samples of this rank for training and evaluation;
- ``start_train``, ``end_train``, ``start_eval``, ``end_eval``, with the batches in between and the
  times of the first, the second and the last;
- ``processes``: everything alive that bears the test's mark, at the first batch and at the end of
  each epoch's training (rank 0 only), with the CPUs of each thread;

and, in ``$DLIO_WITNESS/made-PID.jsonl`` each process that Python code of this run made.

Besides it has tensorflow imported when it is first used, and not before. DLIO 2.0 imports it on
every start, 5 s of CPU on each rank, and uses it for workloads of tensorflow only. And where
``$DLIO_NAMES`` is set, it tells DLIO the names of a bucket's objects: see test_objects.py.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time

from benchmarks.after_import import after_import

WHERE = os.environ.get("DLIO_WITNESS")
MARK = "TEST_CENSUS={}".format(os.environ.get("TEST_CENSUS", ""))
MAKES = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", "os.exec"})
LOADED = {"batch_loaded": "train", "eval_batch_loaded": "eval"}
SPANS = ("start_train", "end_train", "start_eval", "end_eval")
STORAGES = {
    "dlio_benchmark.storage.s3_storage": "S3Storage",
    "dlio_benchmark.storage.s3_torch_storage": "S3PyTorchConnectorStorage",
}


def note(name, **facts):
    """One line of a file of this process or rank."""
    line = json.dumps({"at": time.monotonic(), **facts})
    with open(os.path.join(WHERE, f"{name}.jsonl"), "a") as file:
        file.write(line + "\n")


def mark(name):
    """Give this moment its place in the kernel's record of opened files (see opens.py)."""
    with open(os.path.join(WHERE, "marks", name), "w"):
        pass


def watch_processes():
    """Note each process that this one makes."""

    def seen(event, arguments):
        if event in MAKES:
            note(f"made-{os.getpid()}", event=event, what=repr(arguments)[:200])

    sys.addaudithook(seen)


def assigned(samples):
    """``[[path, index in the file], …]`` of one kind of DLIO's maps, in the order of reading."""
    if not samples:
        return []
    if isinstance(samples, dict) and all(isinstance(dealt, list) for dealt in samples.values()):
        return [
            [path, int(at)] for _, path, at in undealt([samples[one] for one in sorted(samples)])
        ]
    return [[path, int(at)] for _, (path, at) in samples.items()]


def undealt(lists):
    """A rank's samples in their order: DLIO deals them to its threads in equal runs, in turn."""
    run = max(1, sum(map(len, lists)) // len(lists))
    while any(lists):
        for one in lists:
            yield from one[:run]
        lists = [one[run:] for one in lists]


def watch_config(module):
    """Note what each epoch's reconfiguration gave this rank."""
    arguments = module.ConfigArguments
    original = arguments.reconfigure

    def reconfigure(self, epoch_number):
        began = time.monotonic()
        result = original(self, epoch_number)
        train, evaluation = self.train_file_map, self.val_file_map
        if "index" in str(self.data_loader_sampler):
            train, evaluation = self.train_global_index_map, self.val_global_index_map
        note(f"rank-{self.my_rank}", event="assigned", epoch=epoch_number, began=began,
             pid=os.getpid(), train=assigned(train), eval=assigned(evaluation),
             affinity=sorted(os.sched_getaffinity(0)))  # fmt: skip
        return result

    arguments.reconfigure = reconfigure


def watch_stats(module):
    """Note DLIO's own marks of time, and who is alive."""
    counter = module.StatsCounter
    batches = {"train": [], "eval": []}

    def loaded(name):
        original, kind = getattr(counter, name), LOADED[name]

        def method(self, epoch, step, *rest):
            batches[kind].append(time.monotonic())
            if kind == "train" and len(batches[kind]) == 1 and self.my_rank == 0:
                note("processes", epoch=epoch, moment="first batch", alive=alive())
            return original(self, epoch, step, *rest)

        return method

    def span(name):
        original, kind = getattr(counter, name), name.partition("_")[2]

        def method(self, epoch, *rest):
            if name.startswith("start"):
                batches[kind].clear()
                note(f"rank-{self.my_rank}", event=name, epoch=epoch)
                mark(f"{name}-{epoch}-{self.my_rank}")
                return original(self, epoch, *rest)
            mark(f"{name}-{epoch}-{self.my_rank}")
            result = original(self, epoch, *rest)
            times = batches[kind]
            note(f"rank-{self.my_rank}", event=name, epoch=epoch, batches=len(times),
                 first=times[0] if times else None, second=times[1] if times[1:] else None,
                 last=times[-1] if times else None)  # fmt: skip
            if kind == "train" and self.my_rank == 0:
                note("processes", epoch=epoch, moment="end", alive=alive())
            return result

        return method

    for name in LOADED:
        setattr(counter, name, loaded(name))
    for name in SPANS:
        setattr(counter, name, span(name))


def tell_names(module):
    """DLIO's list of a bucket's folder is what stands in ``$DLIO_NAMES``, folder by folder."""

    def walk_node(self, folder, use_pattern=False):
        with open(os.environ["DLIO_NAMES"]) as file:
            return json.load(file)[os.path.basename(folder)]

    if "DLIO_NAMES" in os.environ:
        getattr(module, STORAGES[module.__name__]).walk_node = walk_node


def alive():
    """Process id → command line and CPUs of each thread, of all that bears the mark."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environ = read(f"/proc/{pid}/environ").split(b"\0")
            if MARK.encode() not in environ:
                continue
            found[pid] = {
                "command": read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode().strip(),
                "cpus": [sorted(os.sched_getaffinity(int(one))) for one in threads(pid)],
                "names": sorted(entry.partition(b"=")[0].decode() for entry in environ),
            }
    return found


def threads(pid):
    return os.listdir(f"/proc/{pid}/task")


def read(path):
    with open(path, "rb") as file:
        return file.read()


class Tensorflow:
    """Stands where the module belongs until somebody asks it for something but where it is."""

    __spec__ = importlib.util.find_spec("tensorflow")

    def __getattr__(self, name):
        if sys.modules.get("tensorflow") is self:
            del sys.modules["tensorflow"]
        return getattr(importlib.import_module("tensorflow"), name)


WATCHED = {
    "dlio_benchmark.utils.config": watch_config,
    "dlio_benchmark.utils.statscounter": watch_stats,
    **dict.fromkeys(STORAGES, tell_names),
}


if Tensorflow.__spec__:
    sys.modules["tensorflow"] = Tensorflow()
if WHERE:
    watch_processes()
    after_import(WATCHED)
