"""What must have been read, by what the witness noted; nothing of the adapter is asked."""

import os
import re

import numpy as np

from rayloader.receipt import Fingerprint, name_hashes

KIND = {"train": "train", "valid": "eval"}


class Digests:
    """As a record has them."""

    def __init__(self, names):
        blobs = [os.fsencode(name) for name in names]
        offsets = np.cumsum([0, *map(len, blobs)]).astype(np.int64)
        of = Fingerprint.of(name_hashes(b"".join(blobs), offsets))
        self.content, self.order = f"{of.content:016x}", f"{of.order:016x}"


def fingerprint(names):
    """The digests of names in this order."""
    return Digests(names)


def prefix(run, part, epoch, rank, samples):
    """The files of the first samples that DLIO assigned, each once, in DLIO's order."""
    assigned = run.noted(rank, "assigned", epoch)[KIND[part]]
    return list(dict.fromkeys(path for path, _ in assigned[:samples]))


def in_bucket(path, bucket):
    """The key of an object of DLIO's lists, also where DLIO has made a path of its URI."""
    return re.fullmatch(rf"(?:.*/)?s3:/+{re.escape(bucket)}/(.+)", path)[1]


def hold_opens(run, part, epochs, samples):
    """Hold what the kernel saw opened against what DLIO assigned, epoch by epoch.

    Where a rank was ahead of another, so that epochs overlap, they are taken together.

    Raises:
        AssertionError: other files were opened, or some were not, or outside of the epochs.
    """
    ranks, inside = sorted(run.witness), 0
    groups = []
    for epoch in range(1, epochs + 1):
        first, last = run.span(part, epoch, *ranks)
        wanted = set().union(*(prefix(run, part, epoch, rank, samples) for rank in ranks))
        if groups and first < groups[-1][1]:
            begun, ended, before = groups.pop()
            first, last, wanted = begun, max(last, ended), wanted | before
        groups.append((first, last, wanted))
    for first, last, wanted in groups:
        opened = run.opened(part, first, last)
        assert set(opened) == wanted
        inside += len(opened)
    assert inside == len(run.opened(part)), "files were opened outside of the epochs"


def has_two_cores():
    """Whether ``--bind-to core`` can give two ranks one each."""
    return len(os.sched_getaffinity(0)) >= 2
