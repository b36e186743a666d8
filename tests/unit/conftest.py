"""What unit tests share."""

import contextlib
import os

import pytest
from hypothesis import settings

# Laws are checked on loaded machines too: no time limit per example.
settings.register_profile("rayloader", deadline=None)
settings.load_profile("rayloader")

NOBODY = 65534


@pytest.fixture
def as_somebody(tmp_path, monkeypatch):
    """A context in which permissions count, also when root runs the tests; in ``tmp_path``."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)

    @contextlib.contextmanager
    def somebody():
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)

    return somebody
