"""One request and its answer: C and Python do the same, whatever comes and in whatever pieces."""

import itertools
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayloader.storage import http_client

REQUEST = b"GET /b/k HTTP/1.1\r\n\r\n"
GUARD = b"\xa5" * 8
IMPLEMENTATIONS = [http_client.exchange, http_client.native]
pytestmark = pytest.mark.skipif(http_client.native is None, reason="the C extension is not built")


@pytest.fixture(params=["Python", "C"])
def exchange(request):
    return IMPLEMENTATIONS[request.param == "C"]


def exchanged(exchange, pieces, length, room=256):
    """What it returns, and leaves in head and target, if the answer comes in such pieces.

    A socket that keeps the limits between what is sent makes each receive bring one piece.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    head = bytearray(room)
    guarded = bytearray(GUARD + bytes(length or 0) + GUARD)
    with here, there, memoryview(guarded) as whole:
        for piece in filter(None, pieces):
            there.send(piece)
        there.shutdown(socket.SHUT_WR)
        connection = here if exchange is http_client.exchange else here.fileno()
        target = None if length is None else whole[8 : 8 + length]
        came, read = exchange(connection, REQUEST, head, target)
        assert there.recv(1 << 10) == REQUEST
    assert guarded[:8] == guarded[-8:] == GUARD
    return came, read, bytes(head[:came]), bytes(guarded[8:-8])


def cut(text, places):
    edges = [0, *sorted({min(place, len(text)) for place in places}), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


def head(*fields, status="206 Partial Content", version="HTTP/1.1"):
    return "\r\n".join([f"{version} {status}", *fields, "", ""]).encode()


HOPED = [
    head("content-length: 5"),
    head("Content-Length:5"),
    head("CONTENT-LENGTH:   5  ", "etag: x"),
    head("etag: x", "content-length: 000005"),
    head("content-length: 5", status="200 OK"),
    head("content-length: 5", version="HTTP/1.0"),
    head("x-content-length: 7", "content-length: 5"),
    head("content-length: 5", "content-length: 7"),
    head("x: \0", "content-length: 5"),
]
NOT_HOPED = [
    head("content-length: 4"),
    head("content-length: 6"),
    head("content-length: 0"),
    head("content-length: -5"),
    head("content-length: +5"),
    head("content-length: 5, 5"),
    head("content-length: 5x"),
    head("content-length: 0x5"),
    head("content-length: 5 5"),
    head("content-length:"),
    head("content-length: "),
    head("content-length: \t5"),
    head("content-length: \N{ARABIC-INDIC DIGIT FIVE}"),
    head("content-length: 18446744073709551621"),  # 5, if it wrapped
    head(f"content-length: {'9' * 120}"),
    head(f"content-length: {'0' * 30}5"),
    head("content-length: five", "content-length: 5"),
    head("content-length: 7", "content-length: 5"),
    head("content-length: 5", "transfer-encoding: chunked"),
    head("Transfer-Encoding: chunked", "content-length: 5"),
    head("content-length : 5"),
    head("content-length"),
    head(),
    head("content-length: 5", status="404 Not Found"),
    head("content-length: 5", status="204 No Content"),
    head("content-length: 5", status="100 Continue"),
    head("content-length: 5", version="HTTP/2"),
    head("content-length: 5", version="http/1.1"),
    head("content-length: 5", version="ICY"),
    b"\r\n\r\n",
    b"HTTP/1.1 206\r\n\r\ncontent-length: 5\r\n\r\n",
]


@pytest.mark.parametrize("text", HOPED)
def test_a_body_of_the_length_that_was_hoped_for_is_put_in_place(exchange, text):
    for pieces in ([text, b"12345"], [text + b"12345"], [text + b"12", b"3", b"45"]):
        came, read, heard, target = exchanged(exchange, pieces, 5)
        assert (came, heard) == (len(pieces[0]), pieces[0])
        assert (read, target) == (5, b"12345")


@pytest.mark.parametrize("text", NOT_HOPED)
def test_any_other_answer_leaves_the_target_as_it_is(exchange, text):
    came, read, heard, target = exchanged(exchange, [text + b"12345"], 5)
    assert (came, read, heard) == (len(text) + 5, -1, text + b"12345")
    assert target == bytes(5)


def test_what_comes_after_the_body_is_left_in_the_head(exchange):
    text = head("content-length: 2")
    came, read, _, target = exchanged(exchange, [text + b"12" + b"more than that"], 2)
    assert (came, read, target) == (len(text) + 16, 2, b"12")


def test_without_a_target_only_the_head_is_waited_for(exchange):
    text = head("content-length: 5")
    assert exchanged(exchange, [text, b"12345"], None)[:2] == (len(text), -1)


def test_a_body_without_bytes_is_in_place_at_once(exchange):
    text = head("content-length: 0")
    assert exchanged(exchange, [text], 0)[:2] == (len(text), 0)


@pytest.mark.parametrize("pieces", [[], [b"HTTP"], [head("content-length: 5")[:-1]]])
def test_a_connection_that_ends_before_the_head_does_brings_what_came(exchange, pieces):
    came, read, heard, target = exchanged(exchange, pieces, 5)
    assert (came, heard) == (sum(map(len, pieces)), b"".join(pieces))
    assert (read, target) == (-1, bytes(5))


def test_a_connection_that_ends_within_the_body_says_how_much_is_there(exchange):
    text = head("content-length: 5")
    assert exchanged(exchange, [text], 5)[1:2] == (0,)
    assert exchanged(exchange, [text + b"1", b"23"], 5)[1::2] == (3, b"123\0\0")


def test_a_head_that_does_not_fit_ends_where_the_room_does(exchange):
    text = head("x: " + "y" * 300, "content-length: 5")
    came, read, heard, _ = exchanged(exchange, [text[:200], text[200:]], 5)
    assert (came, read, heard) == (256, -1, text[:256])


def test_a_head_that_just_fits_is_one(exchange):
    text = head("content-length: 5")
    came, read, _, target = exchanged(exchange, [text, b"12345"], 5, room=len(text))
    assert (came, read, target) == (len(text), 5, b"12345")


def test_a_connection_that_broke_is_an_error_of_connections(exchange):
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(ConnectionError):
        exchange(
            here if exchange is http_client.exchange else here.fileno(), REQUEST, bytearray(9), None
        )


def test_a_target_that_cannot_be_written_to_is_refused_before_anything_is_sent():
    here, there = socket.socketpair()
    with here, there:
        for wrong in (memoryview(b"123"), memoryview(bytearray(6))[::2]):
            with pytest.raises(BufferError):
                http_client.native(here.fileno(), REQUEST, bytearray(9), wrong)
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1)


FIELDS = st.one_of(
    st.builds(
        "{}:{}{}{}".format,
        st.sampled_from(["content-length", "Content-Length", "CONTENT-LENGTH", "content-lengt"]),
        st.sampled_from(["", " ", "   ", "\t", "\n"]),
        st.sampled_from(["0", "1", "5", "05", "-5", "+5", "5.", "", "9" * 18, "9" * 19, "5\0"]),
        st.sampled_from(["", " ", "  ", "\t", "\r", ","]),
    ),
    st.sampled_from(["transfer-encoding: x", "Transfer-Encoding:", "x:", "", "\0", "\n", "\r"]),
    st.text(alphabet="\r\n\0:a 5", max_size=8),
)
STATUS = st.sampled_from(
    ["HTTP/1.1 206 x", "HTTP/1.1 200", "HTTP/1.0 2006", "HTTP/1.1 201", "HTTP/1.1 20", "", "\0"]
)


@given(
    status=STATUS,
    fields=st.lists(FIELDS, max_size=4),
    body=st.binary(max_size=9),
    length=st.one_of(st.none(), st.integers(0, 6), st.just(5)),
    places=st.lists(st.integers(0, 120), max_size=6),
    room=st.sampled_from([1, 20, 60, 256]),
    lost=st.integers(0, 12),
)
@example("HTTP/1.1 200", ["\0", "content-length: 5"], b"12345", 5, [], 256, 0)
@example("HTTP/1.1 200", ["content-length:\n5"], b"12345", 5, [30], 256, 2)
def test_c_and_python_are_one_law(status, fields, body, length, places, room, lost):
    text = "\r\n".join([status, *fields, "", ""]).encode() + body
    pieces = cut(text[: len(text) - lost], places)
    by_python, by_c = (exchanged(one, pieces, length, room) for one in IMPLEMENTATIONS)
    assert by_c == by_python


@given(places=st.lists(st.integers(0, 60), max_size=9), extra=st.binary(max_size=3))
def test_how_the_answer_is_cut_makes_no_difference(places, extra):
    text = head("content-length: 5")
    pieces = cut(text + b"12345" + extra, places)
    for one in IMPLEMENTATIONS:
        _, read, heard, target = exchanged(one, pieces, 5)
        assert heard.startswith(text)
        assert (read, target) == (5, b"12345")
