"""Arguments such as DLIO's ConfigArguments has, without DLIO."""

from types import SimpleNamespace

import numpy as np

DEFAULTS = {
    "framework": "pytorch",
    "data_loader": "pytorch",
    "data_loader_sampler": "iterative",
    "reader_classname": None,
    "format": "jpeg",
    "storage_type": "local_fs",
    "storage_options": None,
    "storage_root": "./",
    "data_folder": "./data",
    "num_samples_per_file": 1,
    "record_length": 4096,
    "record_length_stdev": 0,
    "batch_size": 4,
    "batch_size_eval": 2,
    "read_threads": 1,
    "prefetch_size": 2,
    "do_eval": False,
    "epochs": 2,
    "total_training_steps": -1,
    "sample_shuffle": "off",
    "seed": 123,
    "num_files_train": 0,
    "num_files_eval": 0,
    "file_list_train": [],
    "file_list_eval": [],
    "train_file_map": {},
    "val_file_map": {},
    "train_global_index_map": {},
    "val_global_index_map": {},
    "training_steps": 0,
    "eval_steps": 0,
    "train_sample_index_sum": 0,
    "resized_image": np.zeros((8, 8), np.uint8),
}


def arguments(**changes):
    """DLIO 3's arguments; ``files_pre_sharded`` makes them the fork's."""
    return SimpleNamespace(**{**DEFAULTS, **changes})


def old_arguments(**changes):
    """DLIO 2.0's."""
    found = arguments(**changes)
    del found.train_sample_index_sum
    return found


def dealt(paths, threads, run, first=0, per_file=1):
    """A rank's samples as DLIO deals them to its reader threads: (sample, path, index in file)."""
    by_thread = {thread: [] for thread in range(threads)}
    for place, path in enumerate(paths):
        by_thread[(place // run) % threads].append((first + place, path, place % per_file))
    return by_thread
