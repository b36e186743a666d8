"""The servers that these tests rely on do what the tests need them to do."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import botocore.exceptions
import pytest

from tests.s3.proxy import Engine, Proxy
from tests.s3.servers import Nginx, Rclone, client, free_ports

BODY = os.urandom(200_000)
ANY_ERROR = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)


@pytest.fixture(scope="module")
def stored(s3):
    """A bucket with one object."""
    s3.create_bucket(Bucket="stored")
    s3.put_object(Bucket="stored", Key="it", Body=BODY)
    return "stored"


@pytest.fixture
def asked(proxy):
    """Ask for the object through the proxy, with a client that does not try again."""
    through = client(proxy.endpoint, attempts=1)
    yield lambda bucket: through.get_object(Bucket=bucket, Key="it")["Body"].read()
    through.close()


@pytest.mark.parametrize("name", ["seaweed", "rclone", "rclone_tls"])
def test_a_server_gives_back_what_it_was_given_and_checks_who_asks(name, request):
    server = request.getfixturevalue(name)
    s3 = server.client()
    s3.create_bucket(Bucket="check")
    for key in ("a b", "a%20b", "a+b#c?d", "ü🎈", ".hidden", "deep/er/down"):
        s3.put_object(Bucket="check", Key=key, Body=key.encode())
        assert s3.get_object(Bucket="check", Key=key)["Body"].read() == key.encode()
    s3.close()
    other = client(server.endpoint, server.ca)
    other._request_signer._credentials.secret_key = "wrong"
    with pytest.raises(botocore.exceptions.ClientError, match=r"SignatureDoesNotMatch|403"):
        other.get_object(Bucket="check", Key="a b")
    other.close()


def test_a_private_authority_must_be_known(rclone_tls):
    stranger = client(rclone_tls.endpoint)
    with pytest.raises(botocore.exceptions.SSLError):
        stranger.list_buckets()
    stranger.close()


def test_nginx_serves_what_rclone_keeps(rclone, tmp_path):
    (rclone.files / "nginx").mkdir(exist_ok=True)
    (rclone.files / "nginx" / "it").write_bytes(BODY)
    with Nginx(tmp_path / "nginx", rclone.files) as server:
        url = f"{server.endpoint}/nginx/it"
        assert subprocess.check_output(["curl", "--silent", "--fail", url]) == BODY
    s3 = rclone.client()
    assert s3.get_object(Bucket="nginx", Key="it")["Body"].read() == BODY
    s3.close()


def test_a_server_stops_and_comes_back_with_what_it_had(tmp_path):
    server = Rclone(tmp_path)
    with server:
        s3 = server.client()
        s3.put_object(Bucket="ready", Key="it", Body=BODY)
        server.stop()
        with pytest.raises(botocore.exceptions.EndpointConnectionError):
            s3.get_object(Bucket="ready", Key="it")
        server.start()
        assert s3.get_object(Bucket="ready", Key="it")["Body"].read() == BODY
        s3.close()


@pytest.mark.parametrize("end", ["a full stop", "kill -9"])
def test_nothing_is_left_of_servers_and_proxy(end, tmp_path, census):
    code = """
import sys
from pathlib import Path
from tests.s3.proxy import Proxy
from tests.s3.servers import Rclone, SeaweedFS
here = Path(sys.argv[1])
with SeaweedFS(here / "w") as weed, Rclone(here / "r"), Proxy(weed.endpoint, here / "log"):
    print("ready", flush=True)
    input()
"""
    process = census.start(code, str(tmp_path))
    process.line(30)
    assert len(census.processes()) == 4
    if end == "kill -9":
        os.kill(process.pid, signal.SIGKILL)
    else:
        process.tell()
    process.popen.wait(10)
    census.gone(5)


def test_ports_come_with_companions():
    assert all(port + 10_000 < 1 << 16 for port in free_ports(5, extra=10_000))
    assert len(set(free_ports(20))) == 20


# The proxy


def test_the_proxy_passes_everything_and_remembers_it(proxy, stored, asked):
    assert asked(stored) == BODY
    through = client(proxy.endpoint)
    through.put_object(Bucket=stored, Key="deep/a b", Body=b"x" * 1000)
    got = through.get_object(Bucket=stored, Key="deep/a b", Range="bytes=10-19")
    assert got["Body"].read() == b"x" * 10
    through.head_object(Bucket=stored, Key="it")
    names = [entry["Key"] for entry in through.list_objects_v2(Bucket=stored)["Contents"]]
    assert names == ["deep/a b", "it"]
    through.close()
    seen = [(entry.method, entry.path, entry.status, entry.bytes) for entry in proxy.seen()]
    assert seen[:4] == [
        ("GET", f"{stored}/it", 200, len(BODY)),
        ("PUT", f"{stored}/deep/a b", 200, 0),
        ("GET", f"{stored}/deep/a b", 206, 10),
        ("HEAD", f"{stored}/it", 200, 0),
    ]
    assert proxy.seen("GET", "deep")[0].headers["range"] == "bytes=10-19"
    assert "authorization" not in proxy.seen()[0].headers
    assert proxy.peak == 1


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ({"status": 503, "code": "SlowDown"}, "SlowDown"),
        ({"status": 403, "code": "ExpiredToken"}, "ExpiredToken"),
        ({"cut": 1000}, "IncompleteRead"),
        ({"reset": 1000}, "reset by peer"),
        ({"reset": 0}, "closed before|reset by peer"),
    ],
    ids=str,
)
def test_the_proxy_makes_the_trouble_it_is_told_to(proxy, stored, asked, what, error):
    number = proxy.trouble(key="/it$", skip=1, times=1, **what)
    assert asked(stored) == BODY
    with pytest.raises(ANY_ERROR, match=error):
        asked(stored)
    assert proxy.met(number) == 1
    assert asked(stored) == BODY


def test_a_short_body_looks_whole(proxy, stored, asked):
    proxy.trouble(key="/it$", short=1000)
    assert asked(stored) == BODY[:1000]


def test_a_paced_body_takes_its_time(proxy, stored, asked):
    proxy.trouble(key="/it$", pace=1e6)
    began = time.monotonic()
    assert asked(stored) == BODY
    assert 0.19 < time.monotonic() - began < 3


@pytest.mark.parametrize("what", [{"hold": True}, {"stall": 1000}], ids=str)
def test_what_is_held_goes_on_when_released(proxy, stored, asked, what):
    number = proxy.trouble(key="/it$", **what)
    got = []
    thread = threading.Thread(target=lambda: got.append(asked(stored)))
    thread.start()
    proxy.wait_for(number)
    time.sleep(0.05)
    assert proxy.in_flight == 1
    assert not got
    proxy.release(number)
    thread.join(10)
    assert got == [BODY]
    assert proxy.in_flight == 0


def test_the_proxy_goes_away_and_comes_back(proxy, stored, asked):
    assert asked(stored) == BODY
    proxy.go_away()
    with pytest.raises(botocore.exceptions.EndpointConnectionError):
        asked(stored)
    proxy.come_back()
    assert asked(stored) == BODY


def test_when_the_proxy_has_gone_no_connection_is_left():
    """Not soon, but before it says so: else who asks then may be reset instead of refused."""

    async def left():
        engine = Engine("http://127.0.0.1:1")
        await engine.listen()
        connections = [socket.create_connection(("127.0.0.1", engine.port)) for _ in range(5)]
        for connection in connections:
            connection.setblocking(False)
        await asyncio.sleep(0.1)
        await engine.obey("go_away")
        return [connection for connection in connections if not was_reset(connection)]

    assert asyncio.run(left()) == []


def was_reset(connection):
    """Whether the other side has ended a connection hard; now, not soon."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.close()
    raise AssertionError("it was ended softly")


def test_the_proxy_sees_how_many_are_in_flight(proxy, stored, asked):
    proxy.latency = 0.2
    threads = [threading.Thread(target=asked, args=(stored,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert proxy.peak == 5
    assert {entry.in_flight for entry in proxy.seen()} == {1, 2, 3, 4, 5}
    assert all(entry.ended - entry.began >= 0.2 for entry in proxy.seen())


def test_a_proxy_that_remembers_needs_no_server(seaweed, stored, tmp_path):
    with Proxy(seaweed.endpoint, tmp_path / "log", remember=True) as quick:
        through = client(quick.endpoint)
        for _ in range(3):
            assert through.get_object(Bucket=stored, Key="it")["Body"].read() == BODY
            quick.upstream("http://127.0.0.1:1")
        through.close()


def test_a_program_that_does_not_start_says_why(tmp_path):
    server = Rclone(tmp_path)
    server.command = lambda: [sys.executable, "-c", "raise SystemExit('no such luck')"]
    with pytest.raises(RuntimeError, match="no such luck"):
        server.start()
