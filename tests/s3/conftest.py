"""The servers of these tests: started when first asked for, ended with the session.

All that runs in this process speaks to the proxy, and the proxy to the server that a test wants:
s3dlio keeps one client, with one set of credentials, for as long as the process lives.
"""

import contextlib
import itertools
import os

import pytest

from rayloader.testing import Reading
from tests.s3.proxy import Proxy
from tests.s3.reading import Objects, opened
from tests.s3.servers import Nginx, Rclone, SeaweedFS, credentials

CLIENTS = ("http", "obstore", "s3dlio")
_LOGS = []


@pytest.fixture(scope="session")
def server_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


def _kept(server):
    _LOGS.append(server.log)
    return server


@pytest.fixture(scope="session")
def seaweed(server_directory):
    with _kept(SeaweedFS(server_directory / "seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(server_directory):
    with _kept(Rclone(server_directory / "rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_tls(server_directory):
    with _kept(Rclone(server_directory / "rclone-tls", tls=True)) as server:
        yield server


@pytest.fixture(scope="session")
def nginx(server_directory):
    files = server_directory / "nginx-files"
    files.mkdir()
    with _kept(Nginx(server_directory / "nginx", files, remember=False)) as server:
        yield server


@pytest.fixture(scope="session")
def session_proxy(server_directory, seaweed):
    log = server_directory / "proxy.log"
    _LOGS.append(log)
    with Proxy(seaweed.endpoint, log) as proxy:
        yield proxy


@pytest.fixture
def proxy(session_proxy, seaweed, monkeypatch):
    """The proxy before SeaweedFS, with no trouble and an empty record; the environment names it."""
    for name, value in credentials(session_proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    session_proxy.clear()
    session_proxy.forget()
    yield session_proxy
    session_proxy.clear()
    session_proxy.upstream(seaweed.endpoint)


class Folder:
    """A prefix on SeaweedFS; as a string, ``bucket/prefix``."""

    def __init__(self, s3, bucket, prefix):
        self._s3, self._bucket, self._prefix = s3, bucket, prefix

    def __str__(self):
        return f"{self._bucket}/{self._prefix}"

    def put(self, key, body):
        self._s3.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}", Body=body)

    def delete(self, key):
        self._s3.delete_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}")


_numbers = itertools.count()


@pytest.fixture(scope="session")
def shared_bucket(s3):
    """Of all tests: a bucket of its own has volumes of its own, which takes SeaweedFS time."""
    s3.create_bucket(Bucket="tests")
    return "tests"


@pytest.fixture
def folder(s3, shared_bucket):
    """A prefix of the test's own."""
    return Folder(s3, shared_bucket, f"test {next(_numbers)}")


@pytest.fixture(scope="session")
def s3(seaweed):
    """A boto3 client that goes past the proxy."""
    with contextlib.closing(seaweed.client()) as client:
        yield client


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show what the servers said last when a test fails."""
    report = yield
    if report.failed:
        for log in _LOGS:
            with contextlib.suppress(OSError):
                report.sections.append((str(log), log.read_text(errors="replace")[-1500:]))
    return report


@pytest.fixture(scope="session")
def first_use(session_proxy, s3):
    """The clients' own threads and connections, which live as long as the process.

    What s3dlio's first use leaves in the environment is taken back, but for its own settings, some
    of which it reads again at every call.
    """
    for i in range(64):
        s3.put_object(Bucket="ready", Key=f"first/{i}", Body=b"x")
    before = dict(os.environ)
    os.environ.update(credentials(session_proxy.endpoint))
    for client in CLIENTS:
        storage = opened(client=client)
        Reading(storage, 1 << 19).read(b"s3://ready/first", [b"%d" % i for i in range(64)])
        storage.close()
    for name in [name for name in os.environ if not name.startswith("S3DLIO_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(params=["http", "obstore", pytest.param("s3dlio", marks=pytest.mark.slow)])
def client(request):
    """What reads objects; s3dlio has its turn among the slow tests, for time's sake."""
    return request.param


@pytest.fixture
def objects(first_use, proxy, folder, client):
    """``objects(**spec)``: the test's prefix, read by a storage of its own."""
    storages = []

    def open_one(where=folder, endpoint=None, **spec):
        storages.append(opened(endpoint, **{"client": client, **spec}))
        return Objects(storages[-1], where)

    yield open_one
    for storage in storages:
        storage.close()
