"""Places in which workloads run, one for each test module."""

import pytest

from tests.census import Census
from tests.dlio.harness import Dlio


@pytest.fixture(scope="module")
def census():
    one = Census()
    yield one
    one.close()


@pytest.fixture(scope="module")
def dlio(tmp_path_factory, census):
    return Dlio(tmp_path_factory.mktemp("dlio"), census)
