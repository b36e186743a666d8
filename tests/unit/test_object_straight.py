"""How the storage of objects uses rayloader's own client: what it believes, and who else is asked.

s3dlio is a stand-in here, that has every object; what the server answers is scripted.
"""

import contextlib
import gc
import os
import select
import threading
import time

import numpy as np
import pytest

from rayloader.errors import Replaced, Truncated
from rayloader.storage import DROP, Keys, StorageSpec
from rayloader.storage.access import AWS_KEYS, Access
from rayloader.storage.http_client import HttpClient
from rayloader.storage.object import ObjectStorage
from tests.unit.scripted import Server, partial

SECRETS = dict(zip(AWS_KEYS, ("key", "secret"), strict=False))
BODY = b"twelve bytes"
REST = b"S3DLIO WROTE"


class Head:
    size, etag = len(REST), "etag"


class S3dlio:
    """Has one object, under any name."""

    can_bundle = False

    def __init__(self):
        self.asked = []

    def uri(self, name):
        return name

    async def get_into(self, uri, target, length):
        self.asked.append("get_into")
        target[:] = REST[:length]
        return length

    async def get_range(self, uri, offset, length):
        self.asked.append("get_range")
        return REST[offset : offset + length]

    async def head(self, uri):
        self.asked.append("head")
        return Head


@pytest.fixture
def opened():
    """Makes a storage of a server with some answers; its memory is 16 bytes."""
    with contextlib.ExitStack() as stack:

        def make(*answers, **spec):
            server = stack.enter_context(contextlib.closing(Server(*answers)))
            access = Access(server.endpoint, secrets=SECRETS)
            client = S3dlio()
            spec = StorageSpec(scheme="s3", concurrency=4, retry_seconds=0.0, **spec)
            storage = ObjectStorage(spec, access, client, straight=HttpClient(access))
            stack.callback(storage.close)
            memory = bytearray(16)
            storage.attach(memoryview(memory))
            return storage, memory, server, client

        yield make


def finished(storage, seconds=10):
    """The next group that is done."""
    assert select.select([storage.fileno()], [], [], seconds)[0]
    (done,) = storage.collect()
    return done


def read(storage, size=12, place=0):
    """An object of which a list says that it has ``size`` bytes."""
    keys, sizes, places = Keys.of([b"k"]), np.array([size]), np.array([place])
    storage.read(1, b"s3://b", keys, sizes, places)
    return finished(storage)


def fetch(storage, place=0):
    """An object that is measured first."""
    storage.measure(1, b"s3://b", Keys.of([b"k"]))
    assert not finished(storage).failures
    storage.fetch(1, np.array([place]))
    return finished(storage)


def nothing_is_left(storage):
    return (storage._beside, storage._reading, len(storage._in_flight)) == (0, 0, 0)


def test_what_it_brings_is_in_its_place(opened):
    storage, memory, server, client = opened(partial(BODY))
    assert not read(storage, place=2).failures
    assert memory[2:14] == BODY
    assert server.ranges() == [(0, 12)]
    assert not client.asked
    assert nothing_is_left(storage)


def test_an_object_that_is_peeked_at_is_asked_for_once(opened):
    storage, memory, server, client = opened(partial(BODY), peek=True)
    assert not fetch(storage).failures
    assert memory[:12] == BODY
    assert len(server.requests) == 1
    assert not client.asked
    assert nothing_is_left(storage)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(partial(BODY[:5]), Truncated), (partial(BODY + b"!", total=99), Replaced)],
)
def test_an_object_of_another_size_than_was_listed_fails(opened, answer, error):
    storage, memory, _, client = opened(answer)
    assert isinstance(read(storage).failures[0], error)
    assert not any(memory)
    assert not client.asked


def test_an_object_that_has_grown_since_it_was_measured_is_read_as_far(opened):
    storage, memory, _, client = opened(partial(BODY, total=99))
    assert not fetch(storage).failures
    assert memory[:12] == BODY
    assert client.asked == ["head"]


@pytest.mark.parametrize(
    "answer",
    [
        partial(BODY[:5], total=12),
        b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n" + BODY + b"!!",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_an_answer_that_leaves_the_place_empty_is_not_believed(opened, answer):
    storage, memory, _, client = opened(answer)
    assert not fetch(storage).failures
    assert memory[:12] == REST
    assert client.asked == ["head", "get_into"]
    assert storage._straight is None
    assert nothing_is_left(storage)


def test_a_server_of_http_1_0_is_read_from_as_any_other(opened):
    storage, memory, _, client = opened(*[partial(BODY, version="1.0")] * 2)
    for _ in range(2):
        assert not read(storage).failures
        assert memory[:12] == BODY
    assert not client.asked


@pytest.mark.parametrize(
    ("place", "peek"), [(0, False), (DROP, False), (0, True)], ids=["placed", "dropped", "peeked"]
)
def test_without_a_thread_to_wait_in_s3dlio_is_asked(opened, monkeypatch, place, peek):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    storage, memory, server, client = opened(peek=peek)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert not fetch(storage, place).failures
    assert memory[:12] == (bytes(12) if place == DROP else REST)
    assert not server.requests
    assert client.asked[-1] == ("get_range" if peek else "get_into")
    assert nothing_is_left(storage)


def test_a_defect_in_a_thread_is_told_to_the_owner(opened, monkeypatch):
    storage, _, _, _ = opened(partial(BODY))
    monkeypatch.setattr(storage, "_conclude", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read(storage)


def test_connections_are_closed_when_they_are_no_longer_used(opened):
    storage, _, _, _ = opened(partial(BODY), b"SSH-2.0\r\n\r\n", partial(BODY))
    straight = storage._straight
    assert not read(storage).failures
    assert len(straight._idle) == 1
    assert not read(storage).failures
    assert not straight._idle


def test_a_forked_child_may_close_it_whoever_had_its_turn(opened):
    storage, _, _, _ = opened()
    has_it, may_go = threading.Event(), threading.Event()

    def turn():
        with storage._turn:
            has_it.set()
            may_go.wait(30)

    holder = threading.Thread(target=turn)
    holder.start()
    assert has_it.wait(5)
    child = os.fork()
    if child == 0:
        storage.close()
        os._exit(7)
    try:
        assert os.waitstatus_to_exitcode(waited_for(child)) == 7
    finally:
        may_go.set()
        holder.join()


def waited_for(child, seconds=5):
    """The status of a child, which is killed if it hangs."""
    killer = threading.Timer(seconds, os.kill, (child, 9))
    killer.start()
    try:
        return os.waitpid(child, 0)[1]
    finally:
        killer.cancel()


class Large(S3dlio):
    """Has a large object, and knows how much of it was asked for at once."""

    def __init__(self, body):
        super().__init__()
        self.body, self.lengths = body, []

    async def get_range(self, uri, offset, length):
        self.lengths.append(length)
        return self.body[offset : offset + length]

    async def head(self, uri):
        return type("Head", (), {"size": len(self.body), "etag": "etag"})


def test_ranges_that_were_to_go_straight_are_asked_of_s3dlio_by_pieces_that_fit(caplog):
    page = 4096
    body = os.urandom(8 * page + 5)
    chunked = b"HTTP/1.1 206 Partial Content\r\ntransfer-encoding: chunked\r\n\r\n"
    with contextlib.closing(Server(*[chunked] * 3)) as server:
        access, client = Access(server.endpoint, secrets=SECRETS), Large(body)
        spec = StorageSpec(
            scheme="s3", concurrency=4, part_bytes=4 * page, ranges_bytes=4 * page, retry_seconds=0
        )
        storage = ObjectStorage(spec, access, client, straight=HttpClient(access))
        with contextlib.closing(storage):
            memory = bytearray(len(body))
            storage.attach(memoryview(memory))
            assert not read(storage, size=len(body)).failures
            assert nothing_is_left(storage)
    assert memory == body
    assert max(client.lengths) == page
    assert sum(client.lengths) == len(body)
    assert ["read by s3dlio" in line for line in caplog.messages] == [True]


def test_a_storage_that_is_dropped_leaves_no_thread():
    before = set(threading.enumerate())
    with contextlib.closing(Server(partial(BODY))) as server:
        access = Access(server.endpoint, secrets=SECRETS)
        spec = StorageSpec(scheme="s3", concurrency=4)
        storage = ObjectStorage(spec, access, S3dlio(), straight=HttpClient(access))
        storage.attach(memoryview(bytearray(16)))
        read(storage)
        del storage
        deadline = time.monotonic() + 10
        while any(one.name.startswith("rayloader") for one in set(threading.enumerate()) - before):
            assert time.monotonic() < deadline
            gc.collect()
            time.sleep(0.01)
