"""The servers of these tests: started when first asked for, ended with the session.

One process can speak to one endpoint only, because s3dlio reads its environment once. So all that
runs in this process speaks to the proxy, and the proxy to the server that a test wants.
"""

import contextlib
import itertools

import pytest

from tests.s3.proxy import Proxy
from tests.s3.servers import Rclone, SeaweedFS, credentials

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
def session_proxy(server_directory, seaweed):
    log = server_directory / "proxy.log"
    _LOGS.append(log)
    with pytest.MonkeyPatch.context() as patch, Proxy(seaweed.endpoint, log) as proxy:
        for name, value in credentials(proxy.endpoint).items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture
def proxy(session_proxy, seaweed):
    """The proxy before SeaweedFS, with no trouble and an empty record."""
    session_proxy.clear()
    session_proxy.forget()
    yield session_proxy
    session_proxy.clear()
    session_proxy.upstream(seaweed.endpoint)


_numbers = itertools.count()


@pytest.fixture
def bucket(seaweed):
    """The name of a new bucket on SeaweedFS."""
    name = f"test-{next(_numbers)}"
    with contextlib.closing(seaweed.client()) as s3:
        s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
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
