"""Places in which workloads run, one for each test module."""

import pytest

from tests.dlio.harness import Dlio


@pytest.fixture(scope="module")
def dlio(tmp_path_factory, module_census):
    return Dlio(tmp_path_factory.mktemp("dlio"), module_census)
