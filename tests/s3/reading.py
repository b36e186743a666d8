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

    def learn(self, keys, sizes=None):
        """Measure a group, with the sizes that a listing gave; its number and its progress."""
        self._groups += 1
        listed = None if sizes is None else np.asarray(sizes, np.int64)
        self.storage.measure(self._groups, self.root, Keys.of(keys), listed)
        return self._groups, self.wait(self._groups)

    def get(self, keys, sizes=None):
        """Measure and read: bytes by index, and errors by index."""
        group, progress = self.learn(keys, sizes)
        failures = dict(progress.failures)
        places = packed(progress.sizes)
        self.storage.fetch(group, places)
        progress = self.wait(group)
        failures |= progress.failures
        read = {
            i: self.at(places[i], size)
            for i, size in enumerate(progress.sizes.tolist())
            if size >= 0
        }
        return read, failures

    def error(self, key=b"it", size=None):
        """The error that one object gives."""
        read, failures = self.get([key], None if size is None else [size])
        assert read == {}
        return failures[0]
