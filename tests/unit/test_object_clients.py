"""Which client reads objects, and what it can be asked for."""

import sys

import pytest

from rayloader.errors import OptionError
from rayloader.storage.access import Access
from rayloader.storage.object import object_engine
from rayloader.storage.obstore_client import open_obstore

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
ACCESS = Access("http://127.0.0.1:9000", "us-east-1", secrets=KEYS)


@pytest.mark.parametrize(
    ("uri", "spelled"),
    [
        ("s3://b/a", True),
        ("s3://b/a b%20c+d#e?f/ü/.hidden", True),
        ("s3://b/a//b", False),
        ("s3://b//a", False),
        ("s3://b/a/", False),
        ("s3://b/a\nb", False),
        ("az://b/a", False),
    ],
)
def test_what_obstore_would_ask_for_by_another_name_is_not_asked_of_it(uri, spelled):
    assert open_obstore(ACCESS, required=True).spells(uri) is spelled


def test_one_client_serves_all_storages_with_the_same_access():
    assert open_obstore(ACCESS, required=False) is open_obstore(ACCESS, required=True)
    other = Access("http://127.0.0.1:9001", "us-east-1", secrets=KEYS)
    assert open_obstore(other, required=False) is not open_obstore(ACCESS, required=False)


def test_without_keys_and_with_a_bundle_that_is_none_the_reading_is_s3dlios(tmp_path):
    assert open_obstore(Access("http://127.0.0.1:9000"), required=True) is None
    (tmp_path / "empty").write_text("no certificate")
    for bundle in ("empty", "nowhere"):
        access = Access("https://h", "r", str(tmp_path / bundle), KEYS)
        assert open_obstore(access, required=True) is None


@pytest.mark.parametrize(
    ("region", "known"),
    [
        ("us-west-2", True),
        ("us-gov-west-1", True),
        ("", True),
        ("cn-north-1", False),
        ("us-iso-east-1", False),
        ("eu-isoe-west-1", False),
    ],
)
def test_amazons_regions_that_obstore_cannot_find_are_s3dlios(region, known):
    assert (open_obstore(Access("", region, secrets=KEYS), required=True) is not None) is known
    own = Access("http://127.0.0.1:9000", region, secrets=KEYS)
    assert open_obstore(own, required=True) is not None


def test_where_obstore_is_not_installed_the_reading_is_s3dlios(monkeypatch):
    amazon = Access("", "us-east-1", secrets=KEYS)
    assert [object_engine(name, amazon) for name in ("auto", "obstore", "s3dlio")] == [
        "obstore", "obstore", "s3dlio",
    ]  # fmt: skip
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert object_engine("auto", amazon) == "s3dlio"
    assert open_obstore(ACCESS, required=False) is None
    with pytest.raises(OptionError, match="pip install obstore"):
        open_obstore(ACCESS, required=True)
