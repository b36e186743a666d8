"""Names of objects: taken literally, refused by name where they cannot be served."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloader import RankDataset
from rayloader.catalog import Catalog
from rayloader.errors import CatalogError, OptionError
from rayloader.storage.uri import (
    Location,
    is_object,
    joined,
    local_path,
    location,
    root_of,
    scheme_of,
)


def listing(root, **sizes):
    keys = pa.array([key.encode() for key in sizes], pa.large_binary())
    return Catalog(root, keys, np.array(list(sizes.values()), np.int64))


@pytest.mark.parametrize(
    ("uri", "scheme", "bucket", "prefix"),
    [
        (b"s3://bucket", b"s3", b"bucket", b""),
        (b"s3://bucket/", b"s3", b"bucket", b""),
        (b"S3://bucket/train", b"s3", b"bucket", b"train/"),
        (b"s3://bucket/train/", b"s3", b"bucket", b"train/"),
        (b"s3://bucket/a//b", b"s3", b"bucket", b"a//b/"),
        (b"s3://bucket/50%25 #?", b"s3", b"bucket", b"50%25 #?/"),
        (b"az://account/container/x/y", b"az", b"account/container", b"x/y/"),
    ],
)
def test_the_parts_of_a_root(uri, scheme, bucket, prefix):
    place = location(uri)
    assert place == Location(scheme, bucket, prefix)
    assert location(root_of(place)) == place


@pytest.mark.parametrize("uri", [b"s3://", b"s3:///key", b"az://account", b"az:///c/k"])
def test_a_root_without_a_bucket_is_an_error(uri):
    with pytest.raises(CatalogError, match=r"names no bucket; must be (s3|az)://"):
        location(uri)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        (b"s3://b/k", b"s3"),
        (b"gs://b/k", b"gs"),
        (b"hdfs+x.y-z://b", b"hdfs+x.y-z"),
        (b"/data/s3://b", b""),
        (b"./s3://b", b""),
        (b"a b://c", b""),
        (b"://x", b""),
        (b"3s://x", b""),
        (b"s3:/b/k", b""),
    ],
)
def test_a_scheme_is_what_the_standard_calls_one(name, scheme):
    assert scheme_of(name) == scheme


@given(st.binary(min_size=1, max_size=12).filter(lambda key: b"\0" not in key))
def test_a_key_is_joined_and_taken_apart_again_whatever_it_is(key):
    root = b"s3://bucket/some/prefix"
    assert joined(root, key) == root + b"/" + key
    assert joined(b"s3://", b"s3://bucket/" + key) == b"s3://bucket/" + key


def test_a_list_of_uris_has_its_scheme_as_root_and_keeps_its_names():
    names = ["s3://a/x y", "s3://b//z/", "s3://a/x y"]
    catalog = Catalog.of_files(names)
    assert catalog.root == b"s3://"
    assert [catalog.key(i) for i in range(3)] == names
    assert is_object(catalog.root)


def test_file_uris_are_paths():
    catalog = Catalog.of_files(["file:///data/a b", "direct:///data/%41"])
    assert [catalog.key(i) for i in range(2)] == ["/data/a b", "/data/%41"]
    assert not is_object(catalog.root)
    with pytest.raises(CatalogError, match="relative or remote path"):
        local_path(b"file://host/data")


def test_a_file_uri_may_be_a_source(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    assert Catalog.from_source(f"file://{tmp_path}").digest == Catalog.from_source(tmp_path).digest


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["s3://b/k", "path"], "^path: the list begins with s3://b/k, and all must be s3://$"),
        (["s3://b/k", "az://a/c/k"], "^az://a/c/k: the list begins with s3://b/k"),
        (["gs://b/k"], "^gs://b/k: no storage serves gs://: .*s3://BUCKET with endpoint_url="),
        (["ais://b/k"], "AIStore has an S3 interface"),
        (["http://h/k"], "no storage serves http://: known are paths, s3://, az://, file://"),
    ],
)
def test_a_list_that_cannot_be_served_is_refused_by_name(names, words):
    with pytest.raises(CatalogError, match=words):
        Catalog.of_files(names)


@pytest.mark.parametrize("source", ["gs://b/p", "abfss://c@a/p", "s3a://b/p"])
def test_a_source_that_cannot_be_served_says_what_to_do(source):
    with pytest.raises(CatalogError, match=r"no storage serves \w+://: \w"):
        Catalog.from_source(source)


# Sizes of a list that a listing knows


def test_a_list_takes_the_sizes_that_a_listing_has():
    known = listing(b"s3://b/train", **{"a": 1, "b/c": 2, "/d": 3, "s3://b/train/a": 4})
    named = Catalog.of_files(
        ["s3://b/train/b/c", "s3://b/train//d", "s3://b/train/new", "s3://b/other/a",
         "s3://b/train/a", "s3://b/train/a"]
    )  # fmt: skip
    assert named.sized_by(known).sizes.tolist() == [2, 3, -1, -1, 1, 1]
    assert named.sized_by(known).digest == named.digest


def test_sizes_are_taken_from_the_same_root_by_the_same_names():
    known = listing(b"s3://b/train", a=1, b=2)
    same = Catalog(b"s3://b/train", pa.array([b"b", b"x"], pa.large_binary()))
    assert same.sized_by(known).sizes.tolist() == [2, -1]


def test_sizes_of_another_bucket_are_not_taken():
    known = listing(b"s3://b/train", a=1)
    other = Catalog(b"s3://c/train", pa.array([b"a"], pa.large_binary()))
    assert other.sized_by(known).sizes is None
    sized = Catalog.of_files(["s3://b/train/a"], sizes=np.array([7]))
    assert sized.sized_by(known).sizes.tolist() == [7]


def test_a_catalog_of_objects_is_saved_and_read_with_its_root(tmp_path):
    known = listing(b"s3://b/train", a=1, b=2)
    known.save(tmp_path / "it.arrow")
    again = Catalog.from_source(tmp_path / "it.arrow")
    assert (again.root, again.digest, again.sizes.tolist()) == (known.root, known.digest, [1, 2])
    copied = Catalog.loads(known.dumps(), "it", b"/")
    assert (copied.root, copied.digest, copied.sizes.tolist()) == (known.root, known.digest, [1, 2])


def test_direct_uris_ask_for_o_direct():
    assert RankDataset("direct:///data").options.direct is True
    assert RankDataset("direct:///data", direct="fallback").options.direct == "fallback"
    assert RankDataset("file:///data").options.direct is False
    with pytest.raises(OptionError, match="direct:// asks for O_DIRECT"):
        RankDataset().set_epoch(0, files=["direct:///data/a"])
    RankDataset(direct=True).set_epoch(0, files=["direct:///data/a"])
