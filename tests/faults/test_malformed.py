"""Whatever arrives where something is parsed, the answer is a RayloaderError: no hang, no crash."""

import contextlib
import json
import math
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayloader
from rayloader import arena, errors
from rayloader.catalog import Catalog
from rayloader.channel import serve
from rayloader.channel.local import LocalChannel, TrainerMemory
from rayloader.channel.wire import (
    FIELDS,
    PAYLOAD_BYTES,
    Kind,
    pack,
    pack_request,
    pickled,
    unpack,
    unpack_request,
    unpickled,
)
from rayloader.config import PAGE, Options
from rayloader.plan import EpochPlan, ListPlan, Shard
from rayloader.reader import Ended, Reader, Ready, Request
from rayloader.storage import open_storage
from rayloader.storage.memory import MemorySpec

LENGTH = 64 * PAGE
HELD = b"what the trainer holds"

WHOLE = pack_request(Request(1, 0, 0, EpochPlan(12, Shard(), 3)))
edges = st.sampled_from(
    [0, 1, -1, 2, 24, PAGE, LENGTH - 24, LENGTH, LENGTH + 1, 1 << 31, (1 << 62) + 1, (1 << 63) - 1,
     -(1 << 63)]
)  # fmt: skip
numbers = edges | st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 100)
payloads = st.binary(max_size=64) | st.sampled_from(
    [WHOLE, b"[]", b"[1]", b"[[1, 2]]", b"[[]]", b"{}", b"null", b"\xff\xfe", b"[", pickle.dumps(1),
     pickle.dumps(ValueError("other")), pickle.dumps(errors.ChannelError("ours"))]
)  # fmt: skip


@st.composite
def packets(draw, first=numbers):
    """Well-formed ones that say anything, and bytes that are none."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(min_size=1, max_size=200))
    fields = [draw(first), *draw(st.lists(numbers, max_size=5))]
    if len(fields) == 6:
        fields += draw(st.lists(numbers.map(lambda number: number % (1 << 64)), max_size=2))
    return pack(draw(st.sampled_from(Kind)), *fields, payload=draw(payloads))


laws = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# The reader's end


@pytest.fixture
def reader():
    objects = {b"%02d" % n: np.random.default_rng(n).bytes(100 * n) for n in range(12)}
    catalog = Catalog(b"", pa.array(sorted(objects), pa.large_binary()))
    options = Options(batch_size=3, memory_bytes=LENGTH)
    storage = open_storage(
        MemorySpec(objects=objects, concurrency=8, part_bytes=1 << 20, scratch_bytes=LENGTH)
    )
    memory = memoryview(bytearray(LENGTH))
    storage.attach(memory)
    yield objects, catalog, options, storage, memory
    storage.close()


@laws
@given(words=st.lists(packets(), min_size=1, max_size=12))
def test_a_reader_refuses_or_survives_whatever_a_trainer_says(reader, words):
    objects, catalog, options, storage, memory = reader
    one = Reader(storage, memory, options)
    trainer, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with trainer, ours:
        link = serve.SocketLink(ours, os.getpid())
        try:
            for word in words:
                trainer.send(word)
                assert link.listen(one, ())
                one.advance()
        except errors.RayloaderError:
            return
        finally:
            os.close(link._pidfd)
            one.abandon()
            settle(one)
        assert read(one, catalog, memory) == sorted(objects.items())


def settle(reader):
    deadline = time.monotonic() + 5
    while reader.settling and time.monotonic() < deadline:
        reader.advance()


def read(reader, catalog, memory):
    """An epoch, whatever was said before: every object, whole."""
    plan = EpochPlan(len(catalog), Shard(), 3, shuffle=False)
    reader.begin(Request(1 << 40, 0, 0, plan), catalog)
    got, deadline = [], time.monotonic() + 20
    while time.monotonic() < deadline:
        for outcome in reader.advance():
            if isinstance(outcome, Ended):
                return got
            assert isinstance(outcome, Ready), outcome
            for start, size, entry in arena.read_table(memory, outcome.table_at, outcome.samples):
                got.append((catalog.keys_at(np.array([entry]))[0], bytes(memory[start:][:size])))
    raise AssertionError("the reader hangs")


def descriptors_for(kind):
    if kind == "arena":
        return [arena.create_memory(LENGTH)]
    if kind == "nothing":
        return []
    if kind == "empty":
        return [os.memfd_create("empty")]
    if kind == "junk":
        return [arena.create_memory(LENGTH), arena.create_memory(PAGE)]
    return os.pipe()


@laws
@given(
    word=packets() | st.just(pack(Kind.HELLO, 1)),
    kind=st.sampled_from(["arena", "nothing", "empty", "junk", "pipe"]),
)
def test_a_greeting_is_understood_or_refused(word, kind):
    listener = serve.listen_locally()
    fds = descriptors_for(kind)
    accepted = None
    with listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trainer:
        trainer.connect(listener.getsockname())
        socket.send_fds(trainer, [word], fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(errors.RayloaderError):
            accepted = serve.accept_trainer(listener, time.monotonic() + 5)
        if accepted is not None:
            assert (kind, unpack(word)[0]) == ("arena", Kind.HELLO)
            accepted.connection.close()


# The trainer's end


class Impostor:
    """Listens where a reader should, greets as told, and then says what it is told."""

    def __init__(self, words, greeting=None):
        self.listener = serve.listen_locally()
        self.address = self.listener.getsockname()[1:].decode()
        self.words = words
        self.greeting = greeting or pack(
            Kind.WELCOME, payload=b'{"pid": 1, "engine": "", "client": "", "affinity": []}'
        )
        self.thread = threading.Thread(target=self.speak)
        self.thread.start()

    def speak(self):
        connection, _ = self.listener.accept()
        with connection, self.listener, contextlib.suppress(OSError):
            _, fds, _, _ = socket.recv_fds(connection, FIELDS.size, 2)
            for fd in fds:
                os.close(fd)
            for word in [self.greeting, *self.words]:
                connection.send(word)


@pytest.fixture(scope="module")
def memory():
    """A trainer's arena in which it holds one batch."""
    trainers = TrainerMemory(LENGTH)
    trainers.root[PAGE : PAGE + len(HELD)] = np.frombuffer(HELD, np.uint8)
    yield trainers
    trainers.close()


def attached(address, memory):
    return LocalChannel(address, memory, None, timeout=5.0, tell_taken=False)


def received(channel, most):
    """Take what there is until the channel ends; it raises when it does."""
    for _ in range(most):
        if isinstance(channel.receive(lambda: None), Ended):
            return


@laws
@given(words=st.lists(packets(first=st.just(1) | numbers), max_size=12))
def test_a_trainer_refuses_whatever_a_reader_says(memory, words):
    impostor = Impostor(words)
    channel = attached(impostor.address, memory)
    try:
        with contextlib.suppress(errors.RayloaderError):
            channel.begin(Request(1, 0, 0, EpochPlan(6, Shard(), 2)))
            received(channel, len(words) + 1)
    finally:
        channel.close()
        impostor.thread.join(5)
    assert not impostor.thread.is_alive()
    assert bytes(memory.root[PAGE : PAGE + len(HELD)]) == HELD
    assert memory.held_bytes == 0


@laws
@given(greeting=packets())
def test_a_trainer_understands_or_refuses_a_greeting(memory, greeting):
    impostor = Impostor([], greeting)
    with contextlib.suppress(errors.RayloaderError):
        attached(impostor.address, memory).close()
    impostor.thread.join(5)
    assert not impostor.thread.is_alive()


@laws
@given(
    generation=st.integers(0, 1 << 62),
    entries=st.integers(1, 1 << 40),
    world=st.integers(1, 1000),
    seed=st.integers(),
    delivered=st.sets(st.integers(0, 1 << 30), max_size=20),
    shuffle=st.booleans(),
)
def test_a_request_travels_whole(generation, entries, world, seed, delivered, shuffle):
    plan = EpochPlan(entries, Shard(world - 1, world), 7, 3, seed, shuffle, uneven="pad")
    request = Request(generation, 3, world - 1, plan, 5, frozenset(delivered), 2)
    assert unpack_request(pack_request(request)) == request


def test_a_request_that_is_too_long_or_has_a_list_is_a_call_of_the_actor():
    many = frozenset(range(10_000, 200_000, 3))
    plan = EpochPlan(1 << 30, Shard(), 1)
    assert pack_request(Request(1, 0, 0, plan, 0, many)) == b""
    assert pack_request(Request(1, 0, 0, ListPlan(5, 1))) == b""


@laws
@given(data=st.data())
def test_a_request_is_understood_or_refused(data):
    words = json.loads(pack_request(Request(1, 0, 0, EpochPlan(6, Shard(), 2))))
    name = data.draw(st.sampled_from([*words, *(f"plan.{n}" for n in words["plan"]), "new"]))
    where = words["plan"] if name.startswith("plan.") else words
    where[name.removeprefix("plan.")] = data.draw(st.none() | numbers | st.text() | st.just({}))
    with contextlib.suppress(errors.ChannelError):
        unpack_request(json.dumps(words).encode())


# States, options, catalogs


junk = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=6,
)
NAMES = [f"{number}" for number in range(10)]
STATE = rayloader.RankDataset(NAMES, rank=0, world_size=1, batch_size=2).state_dict()


@laws
@given(changes=st.dictionaries(st.sampled_from(sorted(STATE)), junk, max_size=4))
def test_a_state_is_loaded_whole_or_refused(changes):
    dataset = rayloader.RankDataset(NAMES, rank=0, world_size=1, batch_size=2)
    try:
        dataset.load_state_dict({**STATE, **changes})
    except errors.StateMismatch:
        assert dataset.state_dict() == STATE
        return
    assert dataset.state_dict()["epoch"] == changes.get("epoch", 0)
    with contextlib.suppress(errors.StateMismatch):  # it waits for its list
        assert 0 <= len(dataset) <= 5


@laws
@given(state=junk)
def test_what_is_no_state_is_refused(state):
    dataset = rayloader.RankDataset(NAMES, rank=0, world_size=1, batch_size=2)
    with pytest.raises(errors.StateMismatch, match="state"):
        dataset.load_state_dict(state)


OPTIONS = Options().asdict()


@laws
@given(values=st.dictionaries(st.sampled_from(sorted(OPTIONS)), junk, max_size=3))
def test_options_are_taken_or_refused(values):
    try:
        options = Options.of(values)
    except errors.OptionError as refused:
        said = str(refused)
        assert any(name in said for name in values)
        return
    assert options.replace() == options
    assert all(getattr(options, name) == value for name, value in values.items())
    assert math.isfinite(options.start_timeout)


@laws
@given(values=st.dictionaries(junk.filter(lambda key: _hashable(key)), junk, min_size=1))
def test_unknown_options_are_refused(values):
    with pytest.raises(errors.OptionError, match="unknown option"):
        Options.of(values)


def _hashable(value):
    try:
        return hash(value) is not None and value not in OPTIONS
    except TypeError:
        return False


def test_a_batch_may_be_as_large_as_any_number():
    plan = EpochPlan(10, Shard(), 1 << 60, shuffle=False)
    assert plan.batch(0).tolist() == list(range(10))


READ_CATALOGS = """
import sys
import numpy as np
from rayloader.catalog import Catalog
from rayloader.errors import CatalogError
for path in sys.argv[1:]:
    try:
        catalog = Catalog.from_source(path)
        catalog.digest, catalog.total_bytes, catalog.names_at(np.arange(len(catalog)))
        catalog.blob_at(np.arange(len(catalog)))
        print("read")
    except CatalogError as error:
        assert path in str(error), error
        print("refused")
"""


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_spoilt_catalogs_are_refused_or_read(tmp_path, suffix):
    """In a process of its own: Arrow's memory is not Python's."""
    whole = tmp_path / f"whole{suffix}"
    keys = pa.array([b"%03d" % number for number in range(100)], pa.large_binary())
    catalog = Catalog(b"/data", keys, np.arange(100))
    if suffix == ".arrow":
        catalog.save(whole)
    else:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"key": keys, "size": catalog.sizes}), whole)
    paths = [str(whole), *(str(tmp_path / f"{number}{suffix}") for number in range(150))]
    chance = random.Random(3)
    for path in paths[1:]:
        data = bytearray(whole.read_bytes())
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        with open(path, "wb") as file:
            file.write(data)
    done = subprocess.run(
        [sys.executable, "-c", READ_CATALOGS, *paths], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.split()
    assert len(said) == len(paths)
    assert said[0] == "read"
    assert "refused" in said


def test_an_error_too_long_for_a_packet_loses_its_cause_first_and_its_end_then():
    error = errors.SkipBudgetExceeded("3 samples could not be read")
    error.__cause__ = errors.ObjectNotFound("a" * PAYLOAD_BYTES, "no such file")
    error.add_note("rank 3")
    arrived = unpickled(pickled(error))
    assert (type(arrived), str(arrived)) == (errors.SkipBudgetExceeded, str(error))
    assert arrived.__notes__ == ["rank 3"]
    assert arrived.__cause__ is None
    assert error.__cause__ is not None
    cut = unpickled(pickled(error.__cause__))
    assert str(cut).startswith("ObjectNotFound: aaa")
