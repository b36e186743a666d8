"""Which files DLIO has given to this rank for an epoch, in which order, and in how many steps.

Pure functions of DLIO's arguments. DLIO has already sharded: nothing is shuffled or divided here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rayloader import OptionError
from rayloader_dlio.settings import has_plain_paths, is_2_0, is_fork, located


@dataclasses.dataclass(frozen=True)
class Part:
    """Training or validation: where DLIO keeps what belongs to it.

    Attributes:
        name: as DLIO's directories are called.
        batch_size: samples per step [samples].
        files: DLIO's own list: this rank's share, or that of all ranks (see :func:`is_sharded`).
        by_thread: sampler ``iterative``: reader thread → (sample, path, index in the file).
        by_sample: sampler ``index``: sample → (path, index in the file).
        all_files: DLIO's number of files, of this rank or of all [files].
        agreed_steps: the ranks' own agreement where DLIO makes one [batches].
        time: this is read for the so-many-th time, from 1.
    """

    name: str
    batch_size: int
    files: Sequence[str]
    by_thread: Mapping[int, Sequence[tuple[int, str, int]]]
    by_sample: Mapping[int, tuple[str, int]]
    all_files: int
    agreed_steps: int
    time: int = 1

    @classmethod
    def of(cls, args: Any, train: bool, time: int = 1) -> Part:
        """What ``args`` say now; DLIO changes them with every epoch."""
        if train:
            return cls(
                "train",
                int(args.batch_size),
                args.file_list_train,
                args.train_file_map,
                args.train_global_index_map,
                int(args.num_files_train),
                int(args.training_steps),
                time,
            )
        return cls(
            "valid",
            int(args.batch_size_eval),
            args.file_list_eval,
            args.val_file_map,
            args.val_global_index_map,
            int(args.num_files_eval),
            int(args.eval_steps),
            time,
        )


@dataclasses.dataclass(frozen=True)
class Share:
    """One rank's share of one epoch.

    Attributes:
        steps: batches that DLIO takes, and that are read [batches].
        batch_files: files that one batch of the reader holds [files]; ``batch_size`` where a file
            is one sample.
        files: to be read, in order; a file of several samples stands once.
        rest: assigned and not read: they do not fill a batch.
        batches_before: int64 [steps]; when step k is handed out, so many of the reader's batches
            must have arrived; ``None``: one for each step.
    """

    steps: int
    batch_files: int
    files: list[str]
    rest: list[str]
    batches_before: npt.NDArray[np.int64] | None = None

    @property
    def reader_steps(self) -> int:
        """Batches of the reader [batches]."""
        return math.ceil(len(self.files) / self.batch_files)


def named(path: str, args: Any, storage: str) -> str:
    """A file of DLIO's lists as its maps have it: absolute."""
    return located(os.path.abspath(path) if storage == "file" else path, args, storage)


def is_sharded(args: Any) -> bool:
    """Whether DLIO's lists hold this rank's files only."""
    return bool(getattr(args, "files_pre_sharded", False))


def assigned(args: Any, part: Part, ranks: int, storage: str) -> list[str]:
    """The files of the samples that DLIO gave to this rank, in its order, as rayloader names them.

    Args:
        args: DLIO's ConfigArguments.
        part: training or validation.
        ranks: of the run.
        storage: ``file`` or a URI scheme.
    """
    if sampler(args) == "iterative":
        paths = _in_order(part.by_thread, _run_length(args, part, ranks))
    else:
        paths = _divided(args, part) or _looked_up(args, part)
    # A million names an epoch, on the clock: most need no second look.
    return paths if has_plain_paths(args) else [located(path, args, storage) for path in paths]


def _in_order(by_thread: Mapping[int, Sequence[tuple[int, str, int]]], run: int) -> list[str]:
    """Undo what DLIO does to a rank's samples: it deals them to its threads in runs, in turn."""
    lists = [by_thread[thread] for thread in sorted(by_thread)]
    turns = math.ceil(max(map(len, lists), default=0) / run)
    return [
        sample[1]
        for turn in range(turns)
        for each in lists
        for sample in each[turn * run : (turn + 1) * run]
    ]


def _looked_up(args: Any, part: Part) -> list[str]:
    """Every sample asked for in DLIO's index."""
    samples = _sampled(args, sorted(part.by_sample), part.time)
    return [part.by_sample[sample][0] for sample in samples]


def _divided(args: Any, part: Part) -> list[str]:
    """What the fork's virtual index only reckons: file i / n of this rank's list has sample i.

    Asking it costs seconds for millions of samples. Empty where that is not what it says.
    """
    count, per_file = len(part.by_sample), int(args.num_samples_per_file)
    if isinstance(part.by_sample, dict) or not is_sharded(args) or not count:
        return []
    files = part.files
    paths = list(files[:count]) if per_file == 1 else [files[i // per_file] for i in range(count)]
    ends = (0, count // 2, count - 1)
    return paths if all(part.by_sample[end][0] == paths[end] for end in ends) else []


def _sampled(args: Any, samples: list[int], time: int) -> list[int]:
    """A rank's samples as DLIO's torch sampler hands them out.

    That of DLIO 2.0 shuffles its list in place whenever it is iterated over: with ``seed`` by the
    same permutation every time. That of DLIO 3 leaves them in their order.
    """
    shuffle = str(getattr(args.sample_shuffle, "value", args.sample_shuffle))
    if shuffle == "off" or not is_2_0(args):
        return samples
    if shuffle == "random":
        shuffled = list(samples)
        np.random.shuffle(shuffled)
        return shuffled
    permutation = np.arange(len(samples))
    np.random.RandomState(int(args.seed)).shuffle(permutation)
    places = np.arange(len(samples))
    for _ in range(time):
        places = places[permutation]
    return [samples[place] for place in places.tolist()]


def _run_length(args: Any, part: Part, ranks: int) -> int:
    """Samples that DLIO deals to one thread in one go [samples].

    A rank's samples divided by its threads, where all but the fork reckon with those of a rank that
    has the most.
    """
    if is_fork(args):
        samples = sum(map(len, part.by_thread.values()))
    else:
        samples = math.ceil(int(args.num_samples_per_file) * part.all_files / ranks)
    return max(1, samples // max(1, len(part.by_thread)))


def steps_here(args: Any, part: Part, samples: int, ranks: int) -> int:
    """Batches that DLIO's own loader would give this rank, and its loop would take [batches].

    Full batches of this rank's samples, and no more than the loop takes: it breaks at
    ``max_steps``, which the fork agrees between the ranks and the others reckon from all files.
    """
    steps = min(samples // part.batch_size, _loop_steps(args, part, ranks))
    total = int(getattr(args, "total_training_steps", -1))
    return min(steps, total) if part.name == "train" and total > 0 else steps


def _loop_steps(args: Any, part: Part, ranks: int) -> int:
    if is_sharded(args):
        return part.agreed_steps
    samples = int(args.num_samples_per_file) * part.all_files
    steps = math.floor(samples / part.batch_size / ranks)
    # DLIO 2.0 looks after the step, so it takes at least one.
    return max(steps, 1) if is_2_0(args) else steps


def share(args: Any, part: Part, steps: int, ranks: int, storage: str) -> Share:
    """This rank's share, of which the first ``steps`` batches are read.

    Raises:
        OptionError: DLIO has assigned fewer samples.
    """
    paths = assigned(args, part, ranks, storage)
    wanted = steps * part.batch_size
    if len(paths) < wanted:
        raise OptionError(
            f"DLIO gave this rank {len(paths)} samples for {part.name}, and all ranks agreed on "
            f"{steps} steps of {part.batch_size}"
        )
    per_file = int(args.num_samples_per_file)
    if per_file == 1:
        return Share(steps, part.batch_size, paths[:wanted], paths[wanted:])
    read = list(dict.fromkeys(paths[:wanted]))
    known = set(read)
    rest = [path for path in dict.fromkeys(paths[wanted:]) if path not in known]
    batch_files = max(1, part.batch_size // per_file)
    return Share(steps, batch_files, read, rest, _batches_before(paths[:wanted], part, batch_files))


def _batches_before(paths: list[str], part: Part, batch_files: int) -> npt.NDArray[np.int64]:
    """How many of the reader's batches hold what the first k + 1 steps need, int64 [steps]."""
    seen: set[str] = set()
    needed = []
    for first in range(0, len(paths), part.batch_size):
        seen.update(itertools.islice(paths, first, first + part.batch_size))
        needed.append(-(-len(seen) // batch_files))
    return np.array(needed, np.int64)


def sampler(args: Any) -> str:
    """How DLIO keeps a rank's samples: ``iterative`` or ``index``."""
    return str(getattr(args.data_loader_sampler, "value", args.data_loader_sampler))
