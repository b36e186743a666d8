"""What all tests share: a census; an environment that says nothing of this process's own rank."""

import contextlib
import os
import signal

import pytest

from rayloader import launch
from tests.census import Census

for _name in set(os.environ) - set(launch.scrubbed(os.environ)):
    del os.environ[_name]
CHOOSE = ("RAYLOADER_DLIO", "RAYLOADER_DLIO_PYTHON", "RAYLOADER_KUBERAY")
"""Options of the tests themselves: tests/dlio/harness.py, tests/docs/test_kuberay.py."""
for _name in [name for name in os.environ if name.startswith("RAYLOADER_")]:
    if _name not in CHOOSE:
        del os.environ[_name]

# A shell that runs the tests in the background has Ctrl-C ignored, also by every process that they
# start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def census():
    """Starts what is under test, and ends what it leaves."""
    with contextlib.closing(Census()) as one:
        yield one


@pytest.fixture(scope="module")
def module_census():
    """The same for what a module's tests share."""
    with contextlib.closing(Census()) as one:
        yield one
