"""Object storage keeps the contract of every storage, and what only a server can see besides."""

import re

import numpy as np
import pytest

from rayloader.testing import BulkReaderContract, SlowBulkReaderContract, content, packed
from tests.s3.reading import opened


class FolderSite:
    """Objects below a prefix on SeaweedFS."""

    any_name = False

    def __init__(self, folder, client):
        self.root = f"s3://{folder}".encode()
        self._folder, self._client = folder, client

    def put(self, key, data):
        self._folder.put(key.decode(), data)

    replace = put

    def remove(self, key):
        self._folder.delete(key.decode())

    def open(self, **spec):
        return opened(client=self._client, **spec)


class SlowSite:
    """Files that nginx serves through a proxy that takes its time."""

    any_name = False

    def __init__(self, proxy, directory, bucket):
        self.root = f"s3://{bucket}".encode()
        self._proxy, self._directory = proxy, directory / bucket
        self._directory.mkdir()
        self._stuck = {}

    @property
    def latency(self):
        return self._proxy.latency

    @latency.setter
    def latency(self, seconds):
        self._proxy.latency = seconds

    def stick(self, key):
        pattern = f"/{re.escape(key.decode())}$"
        self._stuck[key] = self._proxy.trouble(method="GET", key=pattern, hold=True)

    def unstick(self, key):
        self._proxy.release(self._stuck.pop(key))

    def put(self, key, data):
        (self._directory / key.decode()).write_bytes(data)

    replace = put

    def remove(self, key):
        (self._directory / key.decode()).unlink()

    def open(self, **spec):
        return opened(**spec)


class TestObjects(BulkReaderContract):
    @pytest.fixture
    def site(self, first_use, proxy, folder, client):
        return FolderSite(folder, client)


class TestObjectsOnSlowServer(SlowBulkReaderContract):
    latency = 0.2
    objects = 256
    """A proxy of Python's passes 64 requests on within less."""

    @pytest.fixture
    def site(self, first_use, proxy, nginx, request):
        proxy.upstream(nginx.endpoint)
        bucket = re.sub(r"\W", "-", request.node.name)[-60:].strip("-_").replace("_", "-")
        return SlowSite(proxy, nginx.files, bucket)


# What the server sees

SIZE = 5000
HUNDRED = [b"o%d" % i for i in range(100)]


@pytest.fixture(scope="module")
def hundred(s3):
    """A bucket of 100 objects."""
    s3.create_bucket(Bucket="hundred")
    for key in HUNDRED:
        s3.put_object(Bucket="hundred", Key=key.decode(), Body=content(key, SIZE))
    return "hundred"


def test_an_object_whose_size_is_listed_costs_one_request(proxy, hundred, objects):
    one = objects(hundred)
    read, failures = one.get(HUNDRED, [SIZE] * 100)
    assert failures == {}
    assert [read[i] for i in range(100)] == [content(key, SIZE) for key in HUNDRED]
    seen = [(entry.method, entry.path) for entry in proxy.seen()]
    assert sorted(seen) == sorted(("GET", f"hundred/{key.decode()}") for key in HUNDRED)
    assert one.storage.counters().metadata_ops == 0


def test_an_object_whose_size_is_not_listed_costs_two(proxy, hundred, objects):
    objects(hundred).get(HUNDRED)
    assert sorted(entry.method for entry in proxy.seen()) == ["GET"] * 100 + ["HEAD"] * 100


def test_a_small_object_whose_size_is_not_listed_costs_one_request_when_it_is_peeked_at(
    proxy, hundred, objects
):
    one = objects(hundred, peek=True)
    read, failures = one.get(HUNDRED)
    assert failures == {}
    assert [read[i] for i in range(100)] == [content(key, SIZE) for key in HUNDRED]
    seen = [(entry.method, entry.path) for entry in proxy.seen()]
    assert sorted(seen) == sorted(("GET", f"hundred/{key.decode()}") for key in HUNDRED)
    count = one.storage.counters()
    assert (count.metadata_ops, count.reads, count.bytes_transferred) == (0, 100, 100 * SIZE)


def test_a_peek_that_shows_a_large_object_is_the_last(proxy, hundred, objects):
    one = objects(hundred, peek=True, **PEEKS_OF_4096)
    read, failures = one.get(HUNDRED)
    assert failures == {}
    assert [read[i] for i in range(100)] == [content(key, SIZE) for key in HUNDRED]
    assert len(proxy.seen("GET")) == 1 + 100
    assert len(proxy.seen("HEAD")) == 100


PEEKS_OF_4096 = {"ranges_bytes": 12288, "concurrency": 1}


def test_what_is_held_until_it_is_fetched_is_bounded_and_given_back(proxy, folder, objects):
    keys = [b"%d" % i for i in range(10)]
    for key in keys:
        folder.put(key.decode(), content(key, 1000))
    one = objects(peek=True, **PEEKS_OF_4096)
    for fetched in (False, True, True):
        proxy.forget()
        group, progress = one.measured(one.root, keys)
        assert progress.sizes.tolist() == [1000] * 10
        assert (len(proxy.seen("GET")), len(proxy.seen("HEAD"))) == (5, 5)
        if fetched:
            places = packed(progress.sizes)
            one.storage.fetch(group, places)
            one.wait(group)
            assert [one.at(place, 1000) for place in places] == [content(k, 1000) for k in keys]
        else:
            one.storage.discard(group)


def test_what_was_peeked_at_and_the_ranges_of_others_are_within_one_bound(
    proxy, folder, objects, client
):
    keys = [b"%d" % i for i in range(40)]
    for key in keys:
        folder.put(key.decode(), content(key, 3000))
    body = content("large", 25 * 8192)
    folder.put("large", body)
    one = objects(peek=True, concurrency=16, part_bytes=16384, ranges_bytes=16 * 8192)
    group, progress = one.measured(one.root, keys)
    assert progress.sizes.tolist() == [3000] * 40
    held = 3000 * len(proxy.seen("GET"))
    assert held > 100_000
    proxy.latency = 0.01
    for allowed in ((16 * 8192 - held) // 8192, 16):
        proxy.forget()
        assert one.get([b"large"], [len(body)]) == ({0: body}, {})
        straight = 13  # parts of 16,384, which take no room beside their places
        assert proxy.peak == (straight if client == "http" else allowed)
        if allowed < 16:
            one.storage.discard(group)


def test_while_much_is_held_small_objects_go_straight_to_their_places(proxy, folder, objects):
    for i in range(40):
        folder.put(f"{i}", content(f"{i}", 3000))
    one = objects(peek=True, concurrency=16, ranges_bytes=16 * 8192)
    one.measured(one.root, [b"%d" % i for i in range(40)])
    proxy.forget()
    proxy.latency = 0.05
    read, failures = one.get([b"%d" % i for i in range(40)], [3000] * 40)
    assert failures == {}
    assert [read[i] for i in range(40)] == [content(f"{i}", 3000) for i in range(40)]
    assert proxy.peak == 16
    assert len(proxy.seen()) == 40


@pytest.mark.parametrize("concurrency", [64, 5, 1])
def test_the_server_sees_as_many_in_flight_as_are_allowed(proxy, hundred, objects, concurrency):
    one = objects(hundred, concurrency=concurrency)
    proxy.latency = 0.3 if concurrency == 64 else 0.01
    _, failures = one.get(HUNDRED, [SIZE] * 100)
    assert failures == {}
    assert proxy.peak == concurrency
    assert one.storage.counters().peak_in_flight == concurrency


def test_ranges_of_a_large_object_are_in_flight_together_and_within_the_ceiling(
    proxy, folder, objects
):
    body = content("large", 2_000_000)
    folder.put("large", body)
    one = objects(concurrency=16, part_bytes=65536)
    proxy.latency = 0.1
    read, failures = one.get([b"large"])
    assert (read, failures) == ({0: body}, {})
    gets = proxy.seen("GET")
    assert len(gets) == 31
    assert sum(entry.bytes for entry in gets) == len(body)
    assert proxy.peak == 16


def test_empty_objects_are_read_too(folder, objects):
    for key in ("nothing", "else"):
        folder.put(key, b"")
    assert objects().get([b"nothing", b"else"]) == ({0: b"", 1: b""}, {})
    assert objects().get([b"nothing", b"else"], [0, 0]) == ({0: b"", 1: b""}, {})
    assert objects(peek=True).get([b"nothing", b"else"]) == ({0: b"", 1: b""}, {})


ODD = [
    "a b", "a%20b", "a%2Fb", "a+b", "a#b", "a?b", "a?b=c&d", "ü/é", "e\u0301", "🎈", " lead",
    "trail ", ".hidden", "..two", "a;b", "a:b", "'\"`", "<>|*", "~", "new\nline", "tab\there",
    "a,b=c&d", "@$!()", "-dash", "x" * 250,
]  # fmt: skip


def test_any_name_gives_its_own_bytes(proxy, folder, objects):
    for name in ODD:
        folder.put(name, b"of " + name.encode())
    keys = [name.encode() for name in ODD]
    read, failures = objects().get(keys)
    assert failures == {}
    assert [read[i] for i in range(len(ODD))] == [b"of " + key for key in keys]
    assert {entry.path for entry in proxy.seen()} == {f"{folder}/{name}" for name in ODD}


@pytest.mark.parametrize("name", ["a//b", "//a", "a/", "a//", "/a"])
def test_slashes_go_to_the_server_as_they_are(proxy, folder, objects, name):
    """SeaweedFS folds some of them; the request must not."""
    proxy.trouble(method="GET", key=re.escape(name), status=200, body="body")
    assert objects().get([name.encode()], [4]) == ({0: b"body"}, {})
    assert [entry.path for entry in proxy.seen()] == [f"{folder}/{name}"]


@pytest.mark.parametrize("name", ["a/../it", "./it", "../ready/ready", "a/./b", "..", "."])
def test_a_name_with_dots_for_a_folder_never_gives_another_objects_bytes(
    proxy, folder, objects, name
):
    """The URL layer below would fold them: ``bucket/a/../it`` asks for ``bucket/it``."""
    proxy.trouble(method="GET", status=200, body="wrong")
    error = objects().error(name.encode(), 5)
    assert proxy.seen() == []
    assert str(error).startswith(name)


def test_the_same_object_many_times_and_others_among_them(folder, objects):
    sizes = {b"a": 10, b"b": 3000, b"c": 0}
    for key, size in sizes.items():
        folder.put(key.decode(), content(key, size))
    keys = [b"a", b"b", b"c"] * 30 + [b"b"] * 20
    read, failures = objects().get(keys, [sizes[key] for key in keys])
    assert failures == {}
    assert [read[i] for i in range(len(keys))] == [content(key, sizes[key]) for key in keys]


def test_a_server_that_sends_the_whole_object_for_a_range_of_all_of_it(rclone, objects):
    """rclone does; obstore takes it for a failure."""
    folder = rclone.files / "wholes"
    folder.mkdir(exist_ok=True)
    keys = [b"w%d" % i for i in range(200)]
    for key in keys:
        (folder / key.decode()).write_bytes(content(key, SIZE))
    one = objects("wholes", rclone.endpoint, peek=True)
    read, failures = one.get(keys, [SIZE] * 200)
    assert failures == {}
    assert [read[i] for i in range(200)] == [content(key, SIZE) for key in keys]
    assert one.storage.counters().retries <= 64, "those that were in flight when it showed"
    assert one.get(keys[:5]) == ({i: content(keys[i], SIZE) for i in range(5)}, {})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_objects_are_each_themselves(nginx, objects):
    for i in range(10_000):
        folder = nginx.files / "many" / f"{i // 100}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}").write_bytes(content(str(i), 64 + i % 7))
    numbers = np.random.default_rng(1).permutation(10_000)
    one = objects("many", nginx.endpoint)
    for some in np.split(numbers, 20):
        keys = [b"%d/%d" % (i // 100, i) for i in some]
        read, failures = one.get(keys, [64 + i % 7 for i in some])
        assert failures == {}
        assert [read[at] for at in range(500)] == [content(str(i), 64 + i % 7) for i in some]
    assert one.storage.counters().reads == 10_000
