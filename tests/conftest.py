"""What all tests share: an environment that says nothing about this process's own rank."""

import os
import signal

from rayloader import launch

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
