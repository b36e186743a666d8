"""The commands of docs/launch.md run as they stand, on hosts where no other Ray can be hit.

``ray stop``, which one of them ends with, ends every Ray that it sees.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rayloader.experiment.generate import generate
from tests.census import Census
from tests.hosts import Host, cable

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launch.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```", PAGE, re.M | re.S)
HEAD_BLOCK, OTHERS_BLOCK, USE_BLOCK, SYMMETRIC_BLOCK = [
    "\n".join(line.removeprefix("$ ") for line in block.splitlines()) for block in BLOCKS
]
(FLEET,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
(BATCH,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
FILES = 40
HEAD, OTHER = "10.231.81.1", "10.231.81.2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make hosts of namespaces"),
    pytest.mark.timeout(150),
]


@pytest.fixture
def place(tmp_path):
    """Where the page's commands run: data, and fleet.py."""
    generate(tmp_path / "data" / "train", FILES, 5000)
    (tmp_path / "fleet.py").write_text(FLEET)
    return tmp_path


class Named(Host):
    """A host with a name; each script has processes of its own, and leaves none."""

    def __init__(self, name, census):
        super().__init__("--uts")
        self.prefix.append("--uts")
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")
        self._environ = census.environ(
            PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            RAY_TMPDIR=f"{census.tmp}/{name}",
        )
        os.mkdir(self._environ["RAY_TMPDIR"])

    def start(self, script, place):
        """Begin to run a shell's script, which ends at its first error."""
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]
        return subprocess.Popen(
            [*self.prefix, *apart, f"cd {shlex.quote(str(place))}\n{script}\n:"],
            env=self._environ, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.fixture
def hosts():
    """Two, of which the second is connected with the first."""
    census = Census()
    with contextlib.ExitStack() as stack:
        stack.callback(census.close)
        pair = [
            stack.enter_context(contextlib.closing(Named(name, census))) for name in ("one", "two")
        ]
        cable(pair[0], "eth0", pair[1], "eth0")
        for host, address in zip(pair, (HEAD, OTHER), strict=True):
            host.plug("eth0", address, 24)
            host.run("ip", "route", "add", "default", "dev", "eth0")
        yield pair


@contextlib.contextmanager
def meanwhile(process):
    """End a script that would go on, also where what it is for has failed."""
    with process:
        try:
            yield
        finally:
            process.kill()


def finished(process, seconds=120):
    """What a script printed, which must have succeeded."""
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, said
    return said


def test_an_existing_ray_serves_doctor_read_and_a_fleet(hosts, place):
    said = finished(hosts[0].start(f"{HEAD_BLOCK}\n{USE_BLOCK}", place))
    assert re.search(r"ok +token: this process has the right one; without one it is", said), said
    assert re.search(r"ok +same files: a reader sees the same ones", said)
    assert "\nready (" in said
    assert f"{FILES} files on one" in said.splitlines()[-1]


def test_doctor_tells_of_a_ray_that_asks_nobody_for_a_token(hosts, place):
    """Which is a warning: it works."""
    start = HEAD_BLOCK.splitlines()[-1]
    said = finished(
        hosts[0].start(
            f"export RAY_AUTH_MODE=disabled\n{start}\nrayloader doctor --ray cluster", place
        )
    )
    assert "warning  token: it asks nobody for a token: who reaches it can run code in it" in said


def test_another_node_joins_it(hosts, place):
    """With the same home, so with the same token."""
    head = hosts[0].start(f"{HEAD_BLOCK}\n{WAIT_FOR_TWO}\npython fleet.py", place)
    joins = f"HEAD={HEAD}\nuntil ray health-check --address $HEAD:6379; do sleep 1; done"
    other = hosts[1].start(f"export RAY_AUTH_MODE=token\n{joins}\n{OTHERS_BLOCK}\nsleep 99", place)
    with meanwhile(other):
        assert f"{FILES} files on one two\n" in finished(head)


WAIT_FOR_TWO = "until ray list nodes 2>/dev/null | grep -q 'Total: 2'; do sleep 1; done"


def test_symmetric_run_on_one_machine(hosts, place):
    said = finished(hosts[0].start(SYMMETRIC_BLOCK, place))
    assert f"{FILES} files on one\n" in said


def test_symmetric_run_on_two_hosts(hosts, place):
    """The line of the batch script, as two tasks of one srun would run it.

    Its own status says nothing: the process on the head had joined the Ray that it then stops, and
    Ray ends such a process with status 1.
    """
    command = BATCH[BATCH.index("ray symmetric-run") :]
    exports = f"HEAD={HEAD} SLURM_JOB_NUM_NODES=2 RAY_gcs_rpc_server_reconnect_timeout_s=5"
    script = f"export RAY_AUTH_MODE=token {exports}\n{command}"
    finished(hosts[0].start("ray get-auth-token --generate > /dev/null", place))
    head, other = (host.start(script, place) for host in hosts)
    with meanwhile(other):
        said, _ = head.communicate(timeout=120)
        assert f"{FILES} files on one two\n" in said
