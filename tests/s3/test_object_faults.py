"""What goes wrong between reader and object storage: told apart, tried again, waited for."""

import collections
import threading
import time

import pytest

from rayloader import errors
from rayloader.testing import content
from tests.s3.servers import frozen

SIZE = 200_000
BODY = content("it", SIZE)
QUICK = {"retry_seconds": 0.8}
"""Of storages that are expected to give up."""
WAKEFUL = {"request_timeout": 0.5}
"""Of storages that meet what does not end."""


@pytest.fixture
def it(folder):
    folder.put("it", BODY)
    return folder


def names_all(error, proxy):
    """The message says which object, where, and why, in one line; it pickles."""
    assert isinstance(error, errors.StorageError)
    line = str(error)
    assert line.startswith("it: ")
    assert proxy.endpoint in line
    assert "\n" not in line
    assert error.endpoint == proxy.endpoint


# Errors that stay: one request, one class


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "NoSuchKey", errors.ObjectNotFound),
        (404, "NoSuchBucket", errors.BucketNotFound),
        (403, "AccessDenied", errors.AccessDenied),
        (403, "InvalidObjectState", errors.AccessDenied),
        (403, "InvalidAccessKeyId", errors.CredentialsRejected),
        (403, "SignatureDoesNotMatch", errors.CredentialsRejected),
        (403, "RequestTimeTooSkewed", errors.CredentialsRejected),
        (400, "ExpiredToken", errors.CredentialsExpired),
        (403, "ExpiredToken", errors.CredentialsExpired),
        (400, "AuthorizationHeaderMalformed", errors.CredentialsRejected),
        (416, "InvalidRange", errors.Truncated),
        (400, "SomethingNew", errors.StorageError),
        (301, "PermanentRedirect", errors.StorageError),
    ],
)
def test_what_will_not_pass_is_said_after_one_request(proxy, it, objects, status, code, kind):
    proxy.trouble(status=status, code=code)
    error = objects().error(size=SIZE)
    assert type(error) is kind
    names_all(error, proxy)
    assert len(proxy.seen()) == 1


def test_an_object_that_has_gone_and_a_bucket_that_never_was_are_told_apart(proxy, it, objects):
    assert type(objects().error(b"gone")) is errors.ObjectNotFound
    assert type(objects().error(b"gone", 5)) is errors.ObjectNotFound
    for size in (None, 5):
        assert type(objects("no-such-bucket").error(b"it", size)) is errors.BucketNotFound


def test_what_is_peeked_at_and_not_there_costs_one_request(proxy, it, objects):
    assert type(objects(peek=True).error(b"gone")) is errors.ObjectNotFound
    assert [entry.method for entry in proxy.seen()] == ["GET"]


def test_a_head_that_is_denied_says_why_all_the_same(proxy, it, objects):
    proxy.trouble(status=403, code="ExpiredToken")
    error = objects().error()
    assert type(error) is errors.CredentialsExpired
    assert [entry.method for entry in proxy.seen()] == ["HEAD", "GET"]


def test_one_failure_fails_one_object_only(proxy, it, objects):
    for i in range(50):
        it.put(f"o{i}", content(str(i), 1000))
    proxy.trouble(key="/o7$", status=403, code="AccessDenied")
    keys = [b"o%d" % i for i in range(50)] + [b"gone"]
    read, failures = objects().get(keys, [1000] * 51)
    assert {i: type(error) for i, error in failures.items()} == {
        7: errors.AccessDenied,
        50: errors.ObjectNotFound,
    }
    assert read == {i: content(str(i), 1000) for i in range(50) if i != 7}


# Errors that may pass: tried again here, and nowhere else besides


TRANSIENT = [
    ({"status": 503, "code": "SlowDown"}, errors.Throttled),
    ({"status": 429, "code": "TooManyRequests"}, errors.Throttled),
    ({"status": 500, "code": "InternalError"}, errors.ServerFailure),
    ({"status": 502}, errors.ServerFailure),
    ({"cut": 1000}, errors.Truncated),
    ({"reset": 1000}, (errors.Unreachable, errors.Truncated)),
    ({"reset": 0}, errors.Unreachable),
]


@pytest.mark.parametrize(("what", "kind"), TRANSIENT, ids=str)
def test_what_may_pass_is_asked_for_again(proxy, it, objects, what, kind):
    proxy.trouble(times=2, **what)
    one = objects()
    assert one.get([b"it"], [SIZE]) == ({0: BODY}, {})
    assert len(proxy.seen()) == 3
    assert one.storage.counters().retries == 2
    assert one.storage.counters().throttled == (2 if kind is errors.Throttled else 0)


@pytest.mark.parametrize(("what", "kind"), TRANSIENT, ids=str)
def test_what_does_not_pass_is_said_when_the_time_is_over(proxy, it, objects, what, kind):
    proxy.trouble(**what)
    one = objects(**QUICK)
    began = time.monotonic()
    error = one.error(size=SIZE)
    assert time.monotonic() - began < 3
    assert isinstance(error, kind)
    names_all(error, proxy)
    asked = len(proxy.seen())
    assert 3 <= asked <= 8, "a pause that doubles, and no repetition below"
    assert one.storage.counters().retries == asked - 1


@pytest.mark.parametrize("what", [{"hold": True}, {"stall": 1000}, {"pace": 20_000}], ids=str)
def test_a_deadline_ends_what_hangs_and_what_trickles(proxy, it, objects, what):
    proxy.trouble(**what)
    began = time.monotonic()
    error = objects(**QUICK, **WAKEFUL).error(size=SIZE)
    assert 0.4 < time.monotonic() - began < 5
    assert type(error) is errors.TimedOut
    names_all(error, proxy)


@pytest.mark.parametrize("what", [{"hold": True}, {"stall": 1000}, {"pace": 20_000}], ids=str)
def test_what_hangs_once_is_read_the_second_time(proxy, it, objects, what):
    proxy.trouble(times=1, **what)
    one = objects(**WAKEFUL)
    assert one.get([b"it"], [SIZE]) == ({0: BODY}, {})
    assert one.storage.counters().retries == 1


@pytest.mark.parametrize("client", ["s3dlio"], indirect=True)
def test_an_object_that_hangs_keeps_those_of_its_call_waiting_for_a_moment_only(proxy, it, objects):
    keys = [b"h%d" % i for i in range(8)]
    for key in keys:
        it.put(key.decode(), content(key, 1000))
    held = proxy.trouble(key="/h3$", hold=True)
    one = objects()
    together, _ = one.begin(keys, [1000] * 8)
    proxy.wait_for(held, 2)
    one.until(lambda: one.storage.counters().reads == 8 + 7, "the other seven")
    assert one.storage.oldest_read()[1] == "h3"
    proxy.release(held)
    assert one.wait(together).failures == {}
    assert one.storage.counters().retries == 8
    one.until(lambda: len(proxy.seen(key="/h3$")) == 2, "the end of the request that was given up")
    asked = collections.Counter(entry.path.rpartition("/")[2] for entry in proxy.seen())
    assert dict(asked) == {key.decode(): 2 for key in keys}


def test_a_body_that_looks_whole_and_is_not_is_never_taken_for_it(proxy, it, objects):
    proxy.trouble(method="GET", short=1000)
    error = objects(**QUICK).error(size=SIZE)
    assert type(error) is errors.Truncated
    names_all(error, proxy)


def test_nobody_listens(proxy, it, objects):
    one = objects(**QUICK)
    assert one.get([b"it"], [SIZE])[1] == {}
    proxy.go_away()
    try:
        error = one.error(size=SIZE)
    finally:
        proxy.come_back()
    assert type(error) is errors.Unreachable
    assert "refused" in str(error)
    names_all(error, proxy)


def test_an_address_that_never_answered_is_given_up_soon(proxy, it, objects):
    proxy.go_away()
    began = time.monotonic()
    try:
        error = objects().error(size=SIZE)
    finally:
        proxy.come_back()
    assert type(error) is errors.Unreachable
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", ["the server stops", "the server freezes", "the way is cut"])
def test_a_server_that_comes_back_costs_time_and_no_object(proxy, on_nginx, objects, how):
    server, bucket, keys = on_nginx
    proxy.upstream(server.endpoint)
    one = objects(bucket, request_timeout=1.0)
    assert one.get(keys[:1], [SIZE])[1] == {}
    proxy.latency = 0.05
    over, wrong, rounds = threading.Event(), [], []

    def read():
        while not over.is_set() or not rounds:
            read, failures = one.get(keys, [SIZE] * len(keys))
            wrong.extend(failures.values())
            wrong.extend(i for i in read if read[i] != content(keys[i], SIZE))
            rounds.append(len(read))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.1)
    if how == "the server stops":
        server.stop()
        time.sleep(0.7)
        server.start()  # in this thread, with which it would end
    elif how == "the server freezes":
        with frozen(server):
            time.sleep(1.5)
    else:
        proxy.go_away()
        time.sleep(0.7)
        proxy.come_back()
    over.set()
    reader.join(30)
    assert wrong == []
    assert set(rounds) == {len(keys)}
    assert one.storage.counters().retries > 0


@pytest.fixture
def on_nginx(nginx):
    folder = nginx.files / "outage"
    folder.mkdir(exist_ok=True)
    keys = [b"n%d" % i for i in range(12)]
    for key in keys:
        (folder / key.decode()).write_bytes(content(key, SIZE))
    return nginx, "outage", keys


SIXTY = [b"t%d" % i for i in range(60)]


@pytest.fixture
def refusing(proxy, it, objects):
    """``refusing(concurrency)``: 60 objects are read, and the first 40 requests are refused."""

    def read(concurrency):
        for i in range(60):
            it.put(f"t{i}", content(str(i), 1000))
        proxy.trouble(key="/t", status=503, code="SlowDown", times=40)
        one = objects(concurrency=concurrency)
        read, failures = one.get(SIXTY, [1000] * 60)
        assert failures == {}
        assert read == {i: content(str(i), 1000) for i in range(60)}
        return one.storage.counters()

    return read


def test_each_request_that_is_refused_is_counted_and_sent_once_more(proxy, refusing):
    count = refusing(8)
    assert count.throttled == count.retries == 40
    assert len(proxy.seen()) == 60 + 40


def test_throttling_slows_down_and_ends_nothing(proxy, refusing):
    """Of 64 at once the storage refuses all but some: fewer are sent, and all arrive."""
    count = refusing(64)
    assert 0 < count.throttled <= 40
    last = max(entry.began for entry in proxy.seen() if entry.status == 503)
    assert max(entry.in_flight for entry in proxy.seen() if entry.began > last) < 64


@pytest.mark.parametrize("client", ["s3dlio"], indirect=True)
def test_what_was_in_one_call_with_a_refused_request_is_asked_for_once_more_at_most(
    proxy, refusing
):
    count = refusing(64)
    assert len(proxy.seen()) <= 60 + count.retries <= 60 + 40 + 60


# Objects that are not what they were


@pytest.mark.parametrize("part_bytes", [1 << 20, 65536], ids=["one GET", "ranges"])
@pytest.mark.parametrize(
    ("now", "kind"),
    [
        (None, errors.ObjectNotFound),
        (BODY[:-1], errors.Truncated),
        (b"", errors.Truncated),
        (BODY + b"more", errors.Replaced),
    ],
    ids=["vanished", "shorter", "empty", "longer"],
)
def test_an_object_that_changed_since_it_was_listed_is_an_error_that_says_so(
    it, objects, part_bytes, now, kind
):
    if now is None:
        it.delete("it")
    else:
        it.put("it", now)
    _, failures = objects(part_bytes=part_bytes).get([b"it"], [SIZE])
    assert type(failures[0]) is kind
    if now is not None:
        assert f"{SIZE:,}" in str(failures[0])
        assert f"{len(now):,}" in str(failures[0])


def test_ranges_of_two_versions_are_never_put_together(proxy, it, objects):
    """Replaced by another of the same size while its ranges are read: only an ETag can tell."""
    one = objects(part_bytes=65536, concurrency=1)
    held = proxy.trouble(method="GET", key="/it", skip=1, hold=True)
    group, _ = one.begin([b"it"], [SIZE])
    proxy.wait_for(held)
    it.put("it", content("other", SIZE))
    proxy.release(held)
    failures = one.wait(group).failures
    assert type(failures[0]) is errors.Replaced


def test_a_server_that_ignores_ranges_is_found_out(proxy, it, objects):
    proxy.trouble(method="GET", status=200, body="y" * SIZE)
    error = objects(part_bytes=65536).error(size=SIZE)
    assert type(error) is errors.RangeIgnored
    assert "part_bytes" in str(error)
