"""rayloader's own GETs: signed as S3 wants them, and right whatever a server answers."""

import calendar
import contextlib
import socket
import threading
import time
import weakref

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.utils import percent_encode
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloader.errors import OptionError
from rayloader.storage import StorageSpec, http_client, open_storage
from rayloader.storage.access import AWS_KEYS, Access
from rayloader.storage.callers import Call, Callers, Cancelled
from rayloader.storage.http_client import (
    Found,
    HttpClient,
    Incomplete,
    Refused,
    Signer,
    Unspoken,
    reaches,
)
from rayloader.storage.object import object_engine
from tests.unit.scripted import Answer, Server, partial

KEYS = dict(zip(AWS_KEYS, ("key", "secret"), strict=False))
BODY = b"twelve bytes"


@pytest.fixture(autouse=True)
def no_proxy_is_set(monkeypatch):
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(params=["Python", "C"])
def implementation(request, monkeypatch):
    """The exchange that is used."""
    if request.param == "Python":
        monkeypatch.setattr(http_client, "native", None)
    elif http_client.native is None:
        pytest.skip("the C extension is not built")


@pytest.fixture
def serving(implementation):
    """Makes a server of some answers, and a client of it."""
    with contextlib.ExitStack() as opened:

        def make(*answers):
            server = opened.enter_context(contextlib.closing(Server(*answers)))
            client = HttpClient(Access(server.endpoint, "here", secrets=KEYS))
            opened.callback(client.close)
            return server, client

        yield make


def got(client, length=12, offset=0, **more):
    """What was found, and what came."""
    target = bytearray(length)
    with memoryview(target) as view:
        found = client.get("s3://b/k", offset, view, Call(Callers(), None, None), **more)
    return found, bytes(target)


def peeked(client, length):
    body = client.peek("s3://b/k", length, Call(Callers(), None, None))
    return None if body is None else bytes(body)


# ---- what is asked

TEXTS = st.text(max_size=12) | st.text(alphabet=" %+/~?#&='\"äß\t\n", max_size=12)


@given(
    key=TEXTS,
    region=st.sampled_from(["", "us-east-1", "eu-central-2", "here"]),
    token=st.sampled_from(["", "token/with+signs=="]),
    offset=st.integers(0, 1 << 50),
    length=st.integers(1, 1 << 40),
)
def test_requests_are_signed_as_botocore_signs_them(key, region, token, offset, length):
    secrets = {**KEYS, AWS_KEYS[2]: token}
    path = f"/b/{percent_encode(key, safe='-._~/')}"
    theirs = AWSRequest("GET", f"http://host:9000{path}")
    credentials = Credentials(*KEYS.values(), token or None)
    botocore.auth.S3SigV4Auth(credentials, "s3", region or "us-east-1").add_auth(theirs)
    moment = calendar.timegm(time.strptime(theirs.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ"))

    ours = Signer(Access("", region, secrets=secrets), "host:9000")
    for _ in range(2):  # the key of the day is made once
        lines = ours.get(path, offset, length, moment).decode().split("\r\n")
        assert lines[0] == f"GET {path} HTTP/1.1"
        assert lines[-2:] == ["", ""]
        fields = dict(line.split(":", 1) for line in lines[1:-2])
        assert fields.pop("host") == "host:9000"
        assert fields.pop("range") == f"bytes={offset}-{offset + length - 1}"
        assert fields == {name.lower(): value for name, value in theirs.headers.items()}


def test_another_day_has_another_key():
    signer = Signer(Access("", "", secrets=KEYS), "h")
    first, second, again = (signer.get("/b/k", 0, 1, day * 86400.0) for day in (1, 2, 1))
    assert first == again
    assert first[-64:] != second[-64:]


@given(key=TEXTS)
@settings(max_examples=30)
def test_keys_are_literal_and_spelled_as_botocore_spells_them(key):
    asked = []
    client = HttpClient(Access("http://h", secrets=KEYS))
    client._signer.get = lambda path, *_: asked.append(path)
    client._on = lambda *_: (None, None)
    client._idle.append(None)
    client.peek(f"s3://bucket/{key}", 1, None)
    assert asked == [f"/bucket/{percent_encode(key, safe='-._~/')}"]


# ---- what is answered when all goes well


def test_the_bytes_of_a_range_are_put_in_their_place(serving):
    server, client = serving(partial(BODY, 100, 5000))
    assert got(client, offset=100) == (Found(12, 5000), BODY)
    assert server.ranges() == [(100, 111)]


def test_a_whole_object_where_its_beginning_was_asked_for_will_do(serving):
    _, client = serving(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + BODY)
    assert got(client) == (Found(12, 12), BODY)


def test_an_object_that_goes_on_is_found_so_and_leaves_the_target_as_it_is(serving):
    server, client = serving(partial(BODY + b"!", total=999), partial(BODY))
    assert got(client, ends=True) == (Found(13, 999), bytes(12))
    assert got(client, ends=True) == (Found(12, 12), BODY)
    assert server.ranges() == [(0, 12), (0, 12)]


def test_an_object_that_ends_sooner_is_found_so_and_leaves_the_target_as_it_is(serving):
    _, client = serving(partial(b"short"))
    assert got(client) == (Found(5, 5), bytes(12))


def test_a_peek_brings_all_of_a_small_object_and_nothing_of_another(serving):
    _, client = serving(
        partial(BODY), partial(BODY), partial(BODY, total=99), partial(b"s" * 30_000)
    )
    assert peeked(client, 13) == BODY
    assert peeked(client, 12) is None
    assert peeked(client, 12) is None
    assert peeked(client, 40_000) == b"s" * 30_000


def test_one_connection_serves_one_request_after_the_other(serving):
    server, client = serving(*[partial(BODY)] * 3)
    for _ in range(2):
        assert got(client)[1] == BODY
    assert peeked(client, 13) == BODY
    assert server.asked_on == [0, 0, 0]


@pytest.mark.parametrize(
    "answer",
    [
        partial(BODY, 0, None, "Connection: close"),
        partial(BODY, 0, None, "connection:Close"),
        partial(BODY, 0, None, "connection: x, close"),
        partial(BODY, version="1.0"),
        partial(BODY) + b"more than it said",
    ],
)
def test_a_connection_that_may_not_go_on_is_left(serving, answer):
    server, client = serving(answer, partial(BODY))
    for _ in range(2):
        assert got(client) == (Found(12, 12), BODY)
    assert server.asked_on == [0, 1]


def test_a_connection_that_the_server_has_closed_meanwhile_is_replaced(serving):
    server, client = serving(Answer(partial(BODY), "closed"), partial(BODY))
    for _ in range(2):
        assert got(client)[1] == BODY
    assert server.asked_on == [0, 1]


def test_a_used_connection_that_ends_instead_of_an_answer_costs_one_more_request(serving):
    for end in ("closed", "reset"):
        server, client = serving(partial(BODY), Answer(b"", end), partial(BODY))
        for _ in range(2):
            assert got(client)[1] == BODY
        assert server.asked_on == [0, 0, 1]


def test_a_new_connection_that_ends_instead_of_an_answer_is_not_replaced(serving):
    for end, error in (("closed", Incomplete), ("reset", ConnectionError)):
        server, client = serving(Answer(b"", end), partial(BODY))
        with pytest.raises(error):
            got(client)
        assert server.asked_on == [0]


@pytest.mark.parametrize("words", [partial(BODY)[:-1], b"HTTP/1.1 206 Partial"])
def test_a_used_connection_that_breaks_within_an_answer_is_not_replaced(serving, words):
    for end, error in (("closed", Incomplete), ("reset", ConnectionError)):
        server, client = serving(partial(BODY), Answer(words, end), partial(BODY))
        got(client)
        with pytest.raises(error):
            got(client)
        assert server.asked_on == [0, 0]


# ---- what is answered otherwise

NO_SUCH_KEY = b"<?xml?>\n<Error><Code>NoSuchKey</Code><Message>m</Message></Error>"


@pytest.mark.parametrize(
    ("words", "then"),
    [
        (b"content-length: %d\r\n\r\n" % len(NO_SUCH_KEY) + NO_SUCH_KEY, "kept"),
        (b"transfer-encoding: chunked\r\n\r\n43\r\n" + NO_SUCH_KEY + b"\r\n0\r\n\r\n", "kept"),
        (b"\r\n" + NO_SUCH_KEY, "closed"),
        (b"\r\n" + NO_SUCH_KEY, "kept"),
        (b"content-length: 999999\r\n\r\n" + NO_SUCH_KEY, "kept"),
        (b"content-length: " + b"9" * 5000 + b"\r\n\r\n" + NO_SUCH_KEY, "kept"),
    ],
)
@pytest.mark.parametrize("status", [301, 404, 503])
def test_an_error_is_raised_with_its_status_and_code(serving, words, then, status):
    server, client = serving(Answer(b"HTTP/1.1 %d x\r\n" % status + words, then), partial(BODY))
    with pytest.raises(Refused) as refused:
        got(client)
    assert (refused.value.status, refused.value.code) == (status, "NoSuchKey")
    assert got(client)[1] == BODY
    assert server.asked_on == [0, 1]


@pytest.mark.parametrize(
    "words",
    [
        b"content-length: 15\r\n\r\n<html>no</html>",
        b"content-length: 0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nf\r\n<html>no</html>\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_an_error_without_a_code_is_not_waited_for_longer_than_it_lasts(serving, words):
    _, client = serving(b"HTTP/1.1 502 Bad Gateway\r\n" + words)
    began = time.monotonic()
    with pytest.raises(Refused) as refused:
        got(client)
    assert (refused.value.status, refused.value.code) == (502, "")
    assert time.monotonic() - began < http_client._WORDS_SECONDS / 2


@pytest.mark.parametrize("words", [b"", b"<html>", b"content-length: 99\r\n\r\n<Error>"])
def test_an_error_that_does_not_end_is_not_waited_for_for_ever(serving, monkeypatch, words):
    monkeypatch.setattr(http_client, "_WORDS_SECONDS", 0.05)
    _, client = serving(b"HTTP/1.1 304 Not Modified\r\n" + words + b"\r\n\r\n")
    with pytest.raises(Refused) as refused:
        got(client)
    assert refused.value.status == 304


def test_an_error_whose_words_are_cut_off_is_still_that_error(serving):
    _, client = serving(Answer(b"HTTP/1.1 503 x\r\ncontent-length: 99\r\n\r\n<Err", "reset"))
    with pytest.raises(Refused) as refused:
        got(client)
    assert refused.value.status == 503


@pytest.mark.parametrize(
    ("answer", "offset"),
    [
        (partial(BODY, 101, 5000), 100),
        (partial(BODY[:6], 100, 5000), 100),  # less than was asked for, and the object goes on
        (partial(BODY * 2, 100, 5000), 100),
        (b"HTTP/1.1 206 x\r\ncontent-length: 12\r\n\r\n" + BODY, 0),
        (b"HTTP/1.1 206 x\r\ncontent-range: bytes 0-11/*\r\ncontent-length: 12\r\n\r\n" + BODY, 0),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n" + BODY, 100),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nc\r\n" + BODY + b"\r\n0\r\n\r\n",
            0,
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n" + BODY, 0),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -12\r\n\r\n" + BODY, 0),
        (b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n", 0),
        (b"HTTP/1.1 200 OK\r\ncontent-length:\t12\r\n\r\n" + BODY, 0),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 0),
        (b"HTTP/1.1 100 Continue\r\n\r\n", 0),
        (b"SSH-2.0-OpenSSH\r\n\r\n", 0),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (16 << 10), 0),
    ],
)
def test_what_it_does_not_understand_it_does_not_take_for_an_object(serving, answer, offset):
    server, client = serving(answer, partial(BODY, offset, 5000))
    with pytest.raises(Unspoken):
        got(client, offset=offset)
    assert got(client, offset=offset)[1] == BODY
    assert server.asked_on == [0, 1]


def test_a_part_of_an_object_is_not_taken_for_a_small_object(serving):
    _, client = serving(partial(BODY, total=99))
    with pytest.raises(Unspoken):
        peeked(client, 50)


@pytest.mark.parametrize("words", [partial(BODY)[:-1], partial(BODY)[:-12], b"HTTP/1.1 200"])
def test_an_answer_that_ends_too_soon_is_incomplete(serving, words):
    for ask in (got, lambda client: peeked(client, 13)):
        _, client = serving(Answer(words, "closed"))
        with pytest.raises(Incomplete):
            ask(client)


# ---- connections


def addresses(monkeypatch, *found):
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", where) for where in found],
    )


def test_of_several_addresses_those_that_answer_are_used(serving, monkeypatch):
    server, client = serving(*[partial(BODY)] * 4)
    port = client._address[1]
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as closed:
        nobody = closed.getsockname()
    addresses(monkeypatch, nobody, ("127.0.0.1", port), nobody)
    for _ in range(4):
        assert got(client)[1] == BODY
        client._idle.pop().close()
    assert server.asked_on == [0, 1, 2, 3]
    addresses(monkeypatch, nobody, nobody)
    with pytest.raises(ConnectionRefusedError):
        got(client)


def test_an_endpoint_may_be_an_address_of_ipv6(implementation):
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    endpoint = f"http://[::1]:{listener.getsockname()[1]}"
    assert reaches(Access(endpoint, secrets=KEYS))
    client = HttpClient(Access(endpoint, secrets=KEYS))
    with contextlib.closing(client), listener:
        asking = threading.Thread(target=got, args=(client,))
        asking.start()
        connection, _ = listener.accept()
        with connection:
            assert f"\r\nhost:{endpoint[7:]}\r\n".encode() in connection.recv(1 << 12)
            connection.sendall(partial(BODY))
            asking.join()


def test_a_connection_that_is_used_when_the_client_closes_is_closed_after_it(serving):
    server, client = serving(b"", partial(BODY))
    with calling(lambda call: got_in(client, bytearray(12), call)) as (call, ended):
        assert server.asked.acquire(timeout=5)
        client.close()
        server._connections[0].sendall(partial(BODY))
        assert ended.wait(5)
        assert call.result() == Found(12, 12)
    assert not client._idle


# ---- what nobody waits for any more


@contextlib.contextmanager
def calling(work):
    """The call that has this done, and the event that it has ended."""
    callers, ended = Callers(), threading.Event()
    try:
        yield callers.call(work, lambda _: ended.set()), ended
    finally:
        callers.close(5)


def got_in(client, target, call):
    with memoryview(target) as view:
        return client.get("s3://b/k", 0, view, call)


def is_resizable(target):
    try:
        target.append(0)
    except BufferError:
        return False
    return True


@pytest.mark.parametrize(
    "words",
    [b"", b"HTTP/1.1 2", partial(BODY)[:-12], partial(BODY)[:-1], b"HTTP/1.1 503 x\r\n\r\n<Error>"],
)
@pytest.mark.parametrize("is_used", [False, True])
def test_a_cancelled_call_ends_at_once_and_lets_its_target_go(serving, words, is_used):
    server, client = serving(*[partial(BODY)] * is_used, words)
    if is_used:
        got(client)
        assert server.asked.acquire(timeout=5)
    target = bytearray(12)
    with calling(lambda call: got_in(client, target, call)) as (call, ended):
        assert server.asked.acquire(timeout=5)
        time.sleep(0.01)  # it receives what there is
        assert not ended.is_set()
        assert not call.cancelled()
        call.cancel()
        assert ended.wait(1)
        assert call.cancelled()
        assert call.exception() is not None
        assert is_resizable(target)
    assert not client._idle
    assert len(server.requests) == is_used + 1


def test_a_call_that_was_cancelled_before_asks_nothing(serving):
    server, client = serving(partial(BODY))
    may_begin = threading.Event()
    target = bytearray(12)

    def work(call):
        may_begin.wait()
        return got_in(client, target, call)

    with calling(work) as (call, ended):
        call.cancel()
        may_begin.set()
        assert ended.wait(1)
        assert isinstance(call.exception(), Cancelled)
        assert call.cancelled()
    assert not server.requests
    assert is_resizable(target)


def test_a_call_that_waits_for_a_connection_can_be_cancelled(implementation):
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # now there is no more room
            other = opened.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = HttpClient(Access(endpoint, secrets=KEYS))
        target = bytearray(12)
        call, ended = opened.enter_context(calling(lambda call: got_in(client, target, call)))
        assert not ended.wait(0.1)
        call.cancel()
        assert ended.wait(1)
        assert call.cancelled()
        assert is_resizable(target)


def test_a_call_that_has_ended_is_not_cancelled_any_more(serving):
    _, client = serving(partial(BODY), partial(BODY))
    for _ in range(2):  # also its connection is still good
        with calling(lambda call: got_in(client, bytearray(12), call)) as (call, ended):
            assert ended.wait(5)
            call.cancel()
            assert not call.cancelled()
            assert call.result() == Found(12, 12)


def test_nothing_keeps_what_a_failed_call_was_to_bring(serving):
    class Target(bytearray):
        pass

    _, client = serving(Answer(b"HTTP/1.1 404 x\r\n\r\n", "closed"))
    target = Target(12)
    gone = weakref.ref(target)
    with calling(lambda call, target=target: got_in(client, target, call)) as (call, ended):
        assert ended.wait(5)
        error = call.exception()
        del target, call
    assert isinstance(error, Refused)
    assert gone() is None


# ---- where it can be used


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("http://127.0.0.1:9000", True),
        ("http://host", True),
        ("http://host/", True),
        ("http://[::1]:9000", True),
        ("HTTP://host", True),
        ("https://host", False),
        ("", False),
        ("http://", False),
        ("http://host/s3", False),
        ("http://user:word@host", False),
        ("http://user@host", False),
        ("http://host:99999", False),
        ("http://host:port", False),
        ("http://[::1", False),
        ("http://two..dots", False),
        ("http://" + "x" * 70, False),
    ],
)
def test_it_reaches_endpoints_of_plain_http(endpoint, reached):
    assert reaches(Access(endpoint, secrets=KEYS)) is reached
    assert not reaches(Access(endpoint))
    assert not reaches(Access(endpoint, secrets={AWS_KEYS[0]: "key"}))


@pytest.mark.parametrize("odd", ["two\nlines", "a blank", "\udcff", "ü"])
def test_what_no_head_can_hold_is_left_to_others(odd):
    endpoint = "http://here:9000"
    assert not reaches(Access(endpoint, secrets=KEYS | {AWS_KEYS[2]: odd}))
    assert not reaches(Access(endpoint, secrets=KEYS | {AWS_KEYS[1]: odd}))
    assert not reaches(Access(endpoint, odd, secrets=KEYS))


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_it_does_not_reach_past_a_proxy(monkeypatch, name):
    here, there = (Access(f"http://{host}:9000", secrets=KEYS) for host in ("here", "there"))
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert reaches(here)
    monkeypatch.setenv(name, "http://proxy:3128")
    assert not reaches(here)
    monkeypatch.setenv("no_proxy", "127.0.0.1,here")
    assert reaches(here)
    assert not reaches(there)
    monkeypatch.setenv("no_proxy", "*")
    assert reaches(there)


def test_the_engine_is_named_after_what_reads():
    plain, tls = (Access(f"{scheme}://h", secrets=KEYS) for scheme in ("http", "https"))
    assert object_engine("auto", plain) == object_engine("http", plain) == "http"
    assert object_engine("obstore", plain) == object_engine("auto", tls) == "obstore"
    assert object_engine("s3dlio", plain) == "s3dlio"


@pytest.mark.parametrize("endpoint", ["https://127.0.0.1:9", "http://127.0.0.1:9/s3"])
def test_where_it_cannot_be_used_asking_for_it_says_what_to_do(monkeypatch, endpoint):
    monkeypatch.setattr("rayloader.storage.object.open_client", lambda access: None)
    access = Access(endpoint, secrets=KEYS)
    with pytest.raises(OptionError, match=f"{endpoint}: set endpoint_url, or client='auto'"):
        open_storage(StorageSpec(scheme="s3", access=access, client="http"))
