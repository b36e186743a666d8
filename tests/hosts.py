"""Hosts made of namespaces: each has a network, processes, a name and temporary files of its own.

A *desk* is the machine that somebody sits at: it has the switch that the others are plugged into.
All of it ends with the first process of each host, which takes along whatever runs there. That ends
with the process that made the host, however that ends.

Where the sshd of a host comes from: Debian's packages, unpacked by ``make .hosts/.installed`` into
``.hosts``, or installed on this machine. Nothing outside the hosts is changed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.census import Process, read

ROOT = Path(__file__).resolve().parents[1]
UNPACKED = ROOT / ".hosts"
HOME = "/tmp/home"
"""Of root, on every host with a place of its own."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRON = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8"}
"""Of what is run on a host with a place of its own."""
IDLE = "cat"
"""What a host does when nothing runs on it: wait for the end of what it was made by."""
SSHD = f"""\
HostKey {HOME}/.ssh/host
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
"""


def run(*command, env=None, timeout=60, **more):
    """Run a command that must succeed; what it prints."""
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=env,
        stdin=subprocess.DEVNULL, **more,
    )  # fmt: skip
    assert ran.returncode == 0, f"{shlex.join(command)}\n{ran.stdout[-6000:]}{ran.stderr[-6000:]}"
    return ran.stdout


class Host:
    """A host as far as Ray knows: a network, processes and mounts of its own."""

    def __init__(self, *more):
        """Start it.

        Args:
            *more: words for unshare, of what else is to be its own.
        """
        init = ["sh", "-c", f"exec 3<&0; {IDLE} <&3 & wait $!"]  # which buries the dead
        apart = ["unshare", "--net", "--pid", "--fork", "--mount-proc", *more, *init]
        self._holder = subprocess.Popen(apart, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.pid = 0
        deadline = time.monotonic() + 30
        while not self.pid and self._holder.poll() is None:
            assert time.monotonic() < deadline, "a host does not start"
            children = read(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").split()
            if children and read(f"/proc/{int(children[0])}/cmdline").startswith(b"sh\0"):
                self.pid = int(children[0])
            time.sleep(0.01)
        if not self.pid:
            self._holder.stdin.close()
            pytest.skip("no namespaces can be made here")
        self.prefix = ["nsenter", "-t", str(self.pid), "--net", "--pid", "--mount"]

    def run(self, *command, **more):
        """Run a command there that must succeed; what it prints."""
        return run(*self.prefix, *command, **more)

    def plug(self, link, address, width=30):
        """Give an end of a cable, which it has, an address, and switch it on."""
        self.run("ip", "addr", "add", f"{address}/{width}", "dev", link)
        for one in (link, "lo"):
            self.run("ip", "link", "set", one, "up")

    def close(self):
        """End all that runs on it: the first process of a host takes the others along."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(10)
        self._holder.stdin.close()


def cable(one, end, other, far_end):
    """Connect two hosts, by ends of these names.

    Skips the test where the machine has no such cables.
    """
    link = ["ip", "link", "add", "name", end, "netns", str(one.pid), "type", "veth",
            "peer", "name", far_end, "netns", str(other.pid)]  # fmt: skip
    try:
        subprocess.run(link, check=True, capture_output=True, text=True, timeout=10)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no network between hosts: {getattr(error, 'stderr', error)}")


class Machine(Host):
    """A host with a name, a home, an sshd, and nothing of others' but what is shared.

    Its ``/tmp`` is a folder of ``place``, and has the repository and what else is ``shared`` where
    they are on this machine, as a file system that all hosts mount.
    """

    def __init__(self, name, place, shared=()):
        """Start it; :meth:`Host.plug` and :meth:`serve` come next.

        Skips the test where a host cannot be made, saying why.
        """
        require_tools()
        super().__init__("--uts")
        self.name = name
        self.address = ADDRESSES[name]
        self.prefix += ["--uts"]
        self.tmp = place / name / "tmp"
        """Its /tmp, as seen from outside."""
        self.home = self.tmp / "home"
        (self.home / ".ssh").mkdir(parents=True)
        self.tmp.chmod(0o1777)
        try:
            self.run("sh", "-ec", self._furnish(place / name, shared))
        except AssertionError as error:
            self.close()
            pytest.skip(f"a host of its own cannot be furnished here: {error}")

    def run(self, *command, **more):
        """Run a command there that must succeed; what it prints."""
        return super().run(*command, env=ENVIRON, **more)

    def start(self, python, code, *arguments):
        """Run Python ``code`` there, with an interpreter of that host."""
        return Process([*self.prefix, python, "-c", code, *arguments], ENVIRON)

    def serve(self, public_key):
        """Start its sshd, which lets in root with this key."""
        (self.home / ".ssh" / "authorized_keys").write_text(public_key)
        (self.home / "sshd_config").write_text(SSHD)
        self.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{HOME}/.ssh/host")
        self.run("/usr/sbin/sshd", "-f", f"{HOME}/sshd_config", "-E", "/tmp/sshd.log")

    def processes(self):
        """Command lines of all that runs on it, but for what makes it a host."""
        (namespace,) = {os.readlink(f"/proc/{self.pid}/ns/pid")}
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == namespace and int(pid) != self.pid:
                    line = read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode().strip()
                    if line and line != IDLE and not line.startswith(("sshd:", "/usr/sbin/sshd")):
                        found.append(line)
        return found

    def _furnish(self, place, shared):
        """The commands, run on it as root, that give it what is its own."""
        etc, tools = place / "etc", place / "usr" / "bin"
        etc.mkdir()
        tools.mkdir(parents=True)
        users = Path("/etc/passwd").read_text().splitlines()
        others = [line for line in users if not line.startswith(("root:", "sshd:"))]
        root = f"root:*:0:0:root:{HOME}:/bin/bash"
        sshd = "sshd:*:65533:65534::/run/sshd:/usr/sbin/nologin"
        (etc / "passwd").write_text("\n".join([root, *others, sshd, ""]))
        (etc / "shadow").write_text("root:*:19000::::::\n")
        (etc / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items())
        )
        python = tools / "python3"
        real = os.path.realpath(sys.executable)
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(real)} "$@"\n')
        python.chmod(0o755)
        layers = [tools.parent, UNPACKED / "usr", Path("/usr")]
        lower = ":".join(str(layer) for layer in layers if layer.exists())
        lines = [
            f"hostname {self.name}",
            f"mount -t overlay overlay -o {shlex.quote(f'lowerdir={lower}')} /usr",
            "mount -t tmpfs tmpfs /run",
            "mkdir -p /run/sshd",
            "mount -t tmpfs tmpfs /dev/shm",
        ]
        lines += [f"mount --bind {shlex.quote(str(etc / it))} /etc/{it}" for it in os.listdir(etc)]
        for path in (ROOT, *shared):
            if path.is_relative_to("/tmp"):
                here = self.tmp / path.relative_to("/tmp")
                here.mkdir(parents=True)
                lines.append(shlex.join(["mount", "--rbind", str(path), str(here)]))
        return "\n".join([*lines, shlex.join(["mount", "--rbind", str(self.tmp), "/tmp"])])


DESK = "desk"
ADDRESSES = {"one": "10.231.79.1", "two": "10.231.79.2", DESK: "10.231.79.254"}


class Site:
    """A desk and two hosts on its switch; whoever sits at the desk may log in to both."""

    def __init__(self, place, shared=()):
        """Start all of it.

        Args:
            place: a folder for their files.
            shared: folders that all of them see, where they are.
        """
        with contextlib.ExitStack() as stack:
            self.desk, self.one, self.two = (
                stack.enter_context(contextlib.closing(Machine(name, place, shared)))
                for name in (DESK, *HOSTS)
            )
            self.hosts = [self.one, self.two]
            self.desk.run("ip", "link", "add", "switch", "type", "bridge")
            self.desk.plug("switch", ADDRESSES[DESK], 24)
            keys = self.desk.home / ".ssh" / "id_ed25519"
            self.desk.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", KEY)
            for host in self.hosts:
                cable(host, "eth0", self.desk, host.name)
                self.desk.run("ip", "link", "set", host.name, "master", "switch")
                self.connect(host)
                host.plug("eth0", ADDRESSES[host.name], 24)
                host.run("ip", "route", "add", "default", "via", ADDRESSES[DESK])
                host.serve(keys.with_suffix(".pub").read_text())
            self._stack = stack.pop_all()

    def cut_off(self, host):
        """Pull its cable."""
        self.desk.run("ip", "link", "set", host.name, "down")

    def connect(self, host):
        """Put its cable in."""
        self.desk.run("ip", "link", "set", host.name, "up")

    def close(self):
        """End all of it."""
        self._stack.close()


HOSTS = ("one", "two")
KEY = f"{HOME}/.ssh/id_ed25519"


def require_tools():
    """Skip the test where hosts cannot be made, saying why."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make hosts of namespaces")
    for tool in ("sbin/sshd", "bin/rsync", "bin/ssh", "bin/ssh-keygen"):
        if not any((where / tool).exists() for where in (UNPACKED / "usr", Path("/usr"))):
            pytest.skip(
                f"no {Path(tool).name} here: 'make .hosts/.installed' gets it, as root on Debian"
            )
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"no {tool} here")
