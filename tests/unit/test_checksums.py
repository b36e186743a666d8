"""Samples are what their catalog says, or fail by name."""

import hashlib
import zlib

import numpy as np
import pyarrow as pa
import pytest
from test_reader import Trainer

from rayloader.catalog import Catalog
from rayloader.checksums import Checksums
from rayloader.errors import OptionError, Replaced, StorageError
from rayloader.reader import Ended, Failed, Ready

OBJECTS = {b"a": b"first", b"b": b"second" * 900, b"c": b""}


def crcs():
    return pa.array([zlib.crc32(data) for data in OBJECTS.values()], pa.uint32())


def md5s():
    return pa.array([hashlib.md5(data).hexdigest().encode() for data in OBJECTS.values()])


def reading(checksums, **options):
    trainer = Trainer(dict(OBJECTS), batch_size=1, verify=True, **options)
    keys = trainer.catalog.keys
    trainer.catalog = Catalog(b"", keys, checksums=checksums)
    return trainer


@pytest.mark.parametrize("checksums", [crcs, md5s])
def test_right_bytes_are_delivered(checksums):
    with reading(checksums()) as trainer:
        trainer.begin()
        names = []
        while not isinstance(outcome := trainer.outcome(), Ended):
            names += trainer.keys(outcome)
            trainer.drop(outcome)
        assert names == [b"a", b"b", b"c"]


@pytest.mark.parametrize(("checksums", "says"), [(crcs, "CRC-32"), (md5s, "MD5")])
def test_other_bytes_of_the_same_size_are_an_error(checksums, says):
    with reading(checksums()) as trainer:
        trainer.objects[b"b"] = b"SECOND" * 900
        trainer.begin()
        trainer.drop(trainer.outcome())
        failed = trainer.outcome()
        assert isinstance(failed, Failed)
        assert type(failed.error) is Replaced
        assert str(failed.error).startswith(f"b: its {says} is ")


def test_other_bytes_may_be_left_out():
    with reading(crcs(), on_error="skip") as trainer:
        trainer.objects[b"b"] = b"SECOND" * 900
        trainer.begin()
        batches = []
        while isinstance(outcome := trainer.outcome(), Ready):
            batches.append(outcome)
            trainer.drop(outcome)
        assert [batch.samples for batch in batches] == [1, 0, 1]
        assert batches[1].skipped[0].key == "b"


def test_an_etag_that_is_no_md5_cannot_be_verified_and_says_so():
    checksums = Checksums(Catalog.of_files(["x"], checksums=pa.array([b"d41d8cd9-3"])))
    (expected,) = checksums.of(np.zeros(1, np.int64))
    error = checksums.failure("x", memoryview(b""), expected)
    assert type(error) is StorageError
    assert str(error) == "x: its ETag 'd41d8cd9-3' is no MD5, so it cannot be verified"


def test_a_catalog_without_checksums_cannot_be_verified():
    with pytest.raises(OptionError, match="verify needs a catalog with checksums"):
        Checksums(Catalog.of_files(["x"]))
