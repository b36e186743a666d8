"""How these tests read objects: through the storage alone, as a reader drives it."""

import dataclasses
import os

import numpy as np

from rayloader.storage import Keys, StorageSpec, open_storage
from rayloader.storage.access import Access
from rayloader.testing import Reading, packed


def opened(endpoint=None, **spec):
    """A storage that asks the proxy, or another endpoint."""
    access = Access.found(os.environ)
    if endpoint:
        access = dataclasses.replace(access, endpoint=endpoint)
    return open_storage(StorageSpec(scheme="s3", access=access, **spec))


class Objects(Reading):
    """Objects of one bucket, or of a prefix in it."""

    def __init__(self, storage, where):
        super().__init__(storage)
        self.root = f"s3://{where}".encode()

    def get(self, keys, sizes=None):
        """Read a group; with ``sizes``, those of a listing. Bytes by index, errors by index."""
        failures = {}
        if sizes is None:
            group, progress = self.measured(self.root, keys)
            failures |= progress.failures
            places = packed(progress.sizes)
            self.storage.fetch(group, places)
        else:
            group, places = self.begin(keys, sizes)
        progress = self.wait(group)
        failures |= progress.failures
        read = enumerate(progress.sizes.tolist())
        return {i: self.at(places[i], size) for i, size in read if size >= 0}, failures

    def begin(self, keys, sizes):
        """Read a group of listed sizes: its number, its places."""
        self._groups += 1
        listed = np.asarray(sizes, np.int64)
        places = packed(listed)
        self.storage.read(self._groups, self.root, Keys.of(keys), listed, places)
        return self._groups, places

    def error(self, key=b"it", size=None):
        """The error that one object gives."""
        read, failures = self.get([key], None if size is None else [size])
        assert read == {}
        return failures[0]
