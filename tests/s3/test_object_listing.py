"""Listing of buckets: everything there is, in few requests, several at once where that helps."""

import hashlib
import itertools

import pytest

from rayloader import errors
from rayloader.catalog import Catalog
from rayloader.storage import object_listing
from tests.s3.servers import credentials

_numbers = itertools.count()


@pytest.fixture
def tree(rclone, proxy):
    """``tree(*names)``: a new bucket of rclone's with these objects, behind the proxy."""
    proxy.upstream(rclone.endpoint)

    def made(names):
        bucket = f"list-{next(_numbers)}"
        for name in names:
            path = rclone.files / bucket / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(len(name)))
        return bucket

    return made


def listed(uri, **more):
    catalog = Catalog.from_source(uri, **more)
    keys = catalog.keys.to_pylist()
    assert catalog.sizes is not None
    return dict(zip([key.decode() for key in keys], catalog.sizes.tolist(), strict=True)), catalog


def as_made(names):
    return {name: len(name) for name in names}


def test_a_flat_prefix_takes_a_request_per_thousand_objects(proxy, tree):
    names = [f"n{i:04d}" for i in range(2050)]
    bucket = tree(names)
    ticks = []
    found, catalog = listed(f"s3://{bucket}", progress=ticks.append)
    assert found == as_made(names)
    assert list(found) == sorted(names)
    assert len(proxy.seen()) == catalog.metadata_ops == 3
    assert ticks == sorted(ticks)
    assert ticks[-1] == 2050


def test_folders_are_listed_side_by_side(proxy, tree):
    names = [f"train/part{i % 20:02d}/n{i}" for i in range(400)] + ["train/readme", "other/x"]
    bucket = tree(names)
    proxy.latency = 0.2
    found, _ = listed(f"s3://{bucket}/train/")
    assert found == {
        name.removeprefix("train/"): len(name) for name in names if name.startswith("train/")
    }
    assert max(entry.in_flight for entry in proxy.seen()) >= 8
    assert len(proxy.seen()) <= 1 + 20 + 1


def test_very_many_folders_are_not_asked_for_one_by_one(proxy, tree, monkeypatch):
    monkeypatch.setattr(object_listing, "_MOST_FOLDERS", 20)
    names = [f"f{i:04d}/x" for i in range(40)]
    bucket = tree(names)
    found, _ = listed(f"s3://{bucket}")
    assert found == as_made(names)
    assert len(proxy.seen()) == 1 + 1


def test_a_glob_keeps_to_its_components(tree):
    names = ["a/1.bin", "a/2.txt", "a/b/3.bin", "c.bin", "odd[1]/x.bin"]
    bucket = tree(names)
    assert set(listed(f"s3://{bucket}/a/*.bin")[0]) == {"1.bin"}
    assert set(listed(f"s3://{bucket}/**/*.bin")[0]) == {
        "a/1.bin", "a/b/3.bin", "c.bin", "odd[1]/x.bin",
    }  # fmt: skip
    assert set(listed(f"s3://{bucket}/odd[1]")[0]) == {"x.bin"}, "a name wins over a glob"


def test_folder_markers_are_left_out_and_empty_objects_are_not(proxy, folder):
    for key, body in (("p/", b""), ("p/sub/", b""), ("p/empty", b""), ("p/sub/x", b"x")):
        folder.put(key, body)
    assert listed(f"s3://{folder}/p")[0] == {"empty": 0, "sub/x": 1}


def test_etags_are_kept_when_they_are_wanted(proxy, folder):
    folder.put("x", b"xyz")
    _, catalog = listed(f"s3://{folder}", etags=True)
    assert catalog.checksums.to_pylist() == [hashlib.md5(b"xyz").hexdigest().encode()]
    assert listed(f"s3://{folder}")[1].checksums is None


def test_a_prefix_is_not_the_beginning_of_a_name(tree):
    bucket = tree(["train/x", "training/y", "train2"])
    assert set(listed(f"s3://{bucket}/train")[0]) == {"x"}


def test_nothing_below_a_prefix_is_an_error(tree):
    bucket = tree(["train/x"])
    with pytest.raises(errors.EmptyCatalog, match=f"nothing to read in s3://{bucket}/none"):
        Catalog.from_source(f"s3://{bucket}/none")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AccessDenied", errors.AccessDenied),
        (403, "SignatureDoesNotMatch", errors.CredentialsRejected),
        (400, "ExpiredToken", errors.CredentialsExpired),
        (404, "NoSuchBucket", errors.BucketNotFound),
        (500, "InternalError", errors.ServerFailure),
        (503, "SlowDown", errors.Throttled),
    ],
)
def test_why_a_bucket_cannot_be_listed_is_one_class(proxy, status, code, kind):
    proxy.trouble(status=status, code=code)
    with pytest.raises(kind) as raised:
        Catalog.from_source("s3://some/prefix")
    assert str(raised.value).startswith("s3://some/prefix: ")
    assert proxy.endpoint in str(raised.value)
    assert len(proxy.seen()) <= 5


def test_a_listing_that_fails_in_the_middle_is_no_shorter_listing(proxy, tree):
    bucket = tree([f"d{i}/{j}" for i in range(5) for j in range(3)])
    proxy.trouble(skip=4, status=403, code="AccessDenied")
    with pytest.raises(errors.AccessDenied):
        Catalog.from_source(f"s3://{bucket}")


def test_without_credentials_it_says_what_to_set(proxy, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(errors.CredentialsRejected, match="set AWS_ACCESS_KEY_ID and"):
        Catalog.from_source("s3://some")
    assert proxy.seen() == []


def test_a_profile_has_the_credentials(proxy, folder, tmp_path, monkeypatch):
    folder.put("x", b"x")
    keys = credentials(proxy.endpoint)
    profile = tmp_path / "credentials"
    profile.write_text(
        f"[some]\naws_access_key_id={keys['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key={keys['AWS_SECRET_ACCESS_KEY']}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "some")
    assert listed(f"s3://{folder}")[0] == {"x": 1}
