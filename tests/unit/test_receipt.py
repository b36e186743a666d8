import dataclasses
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayloader.receipt import Fingerprint, Receipt, Skipped, latency_quantile, name_hashes

NAMES = st.lists(st.binary(min_size=1, max_size=30), max_size=12)


def of(names):
    offsets = np.cumsum([0, *map(len, names)])
    return Fingerprint.of(name_hashes(b"".join(names), offsets))


@given(NAMES, st.data())
def test_content_ignores_the_order_and_order_does_not(names, data):
    shuffled = data.draw(st.permutations(names))
    assert of(shuffled).content == of(names).content
    assert (of(shuffled).order == of(names).order) == (shuffled == names)


@given(NAMES, NAMES)
def test_fingerprints_of_parts_join_to_that_of_the_whole(first, second):
    assert of(first).then(of(second)) == of(first + second)
    assert Fingerprint().then(of(first)) == of(first)


@given(NAMES, NAMES)
def test_other_names_have_another_fingerprint(first, second):
    assert (sorted(first) == sorted(second)) == (of(first).content == of(second).content)


def test_a_name_is_not_confused_with_its_parts():
    assert of([b"ab", b"c"]) != of([b"a", b"bc"])
    assert of([b"abc"]).content != of([b"ab", b"c"]).content


def test_a_fingerprint_may_begin_in_the_middle_of_a_blob():
    whole = np.array([0, 3, 5, 9])
    assert Fingerprint.of(name_hashes(b"abcdefghi", whole[1:])) == of([b"de", b"fghi"])


def test_a_receipt_turns_into_plain_json():
    receipt = Receipt(epoch=2, files=3, skipped=[Skipped("a", "gone")])
    values = json.loads(json.dumps(receipt.asdict()))
    assert values["skipped"] == [{"key": "a", "cause": "gone"}]
    assert set(values) == {field.name for field in dataclasses.fields(Receipt)}


def test_latency_quantiles_come_from_the_buckets():
    latency = np.zeros(128, np.int64)
    assert latency_quantile(latency, 0.5) == 0.0
    latency[40] = 98  # 2^10 µs and more
    latency[48] = 2  # 2^12 µs and more
    assert 1.024e-3 <= latency_quantile(latency, 0.50) < 1.22e-3
    assert 4.096e-3 <= latency_quantile(latency, 0.99) < 4.9e-3
