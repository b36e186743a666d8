"""Who is there: the processes, files and sockets that a piece of code under test has left.

Processes are found by a mark in their environment, which all that they start inherit, so that
other things running on the machine do not disturb a test.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

MARK = "TEST_CENSUS"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Census:
    """Marks what it starts, and counts it later."""

    def __init__(self):
        self.mark = secrets.token_hex(8)
        self.home = tempfile.mkdtemp(prefix="h-", dir="/tmp")
        self.tmp = tempfile.mkdtemp(prefix="t-", dir="/tmp")
        self._shm = set(os.listdir("/dev/shm"))
        self._started = []

    def environ(self, **changes):
        """An environment for a process under test: marked, with its own HOME and TMPDIR."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {**kept, MARK: self.mark, "HOME": self.home, "TMPDIR": self.tmp,
                "PYTHONPATH": ROOT, **changes}  # fmt: skip

    def start(self, code, *arguments, prefix=(), **environ):
        """Run Python ``code`` in a process under test."""
        process = Process(
            [*prefix, sys.executable, "-c", code, *arguments], self.environ(**environ)
        )
        self._started.append(process)
        return process

    def processes(self, but=()):
        """Command lines of the living processes under test, by id."""
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                environ = read(f"/proc/{pid}/environ").split(b"\0")
                if f"{MARK}={self.mark}".encode() in environ and pid not in but:
                    found[pid] = read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode()
        return found

    def pid_of(self, part):
        """The one process under test whose command line contains ``part``."""
        (pid,) = [pid for pid, line in self.processes().items() if part in line]
        return pid

    def left(self):
        """All that is still there: processes, temporary files, shared memory."""
        shm = {
            name
            for name in set(os.listdir("/dev/shm")) - self._shm
            if os.stat(f"/dev/shm/{name}", follow_symlinks=False).st_uid == os.getuid()
            and name.startswith(("plasma", "ray", "sem.ray"))
        }
        return [*self.processes().values(), *sorted(os.listdir(self.tmp)), *sorted(shm)]

    def gone(self, seconds):
        """Wait until nothing is left; the seconds it took.

        Raises:
            AssertionError: something is left after ``seconds``.
        """
        began = time.monotonic()
        while left := self.left():
            assert time.monotonic() - began < seconds, f"left after {seconds} s: {left}"
            time.sleep(0.02)
        return time.monotonic() - began

    def close(self):
        """End what the test has not ended."""
        for process in self._started:
            process.close()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for directory in (self.home, self.tmp):
            shutil.rmtree(directory, ignore_errors=True)


class Process:
    """A process under test that says lines and is told lines."""

    def __init__(self, command, environ):
        self.popen = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.pid = self.popen.pid

    def line(self, seconds=20.0):
        """The next line that it prints."""
        text = b""
        deadline = time.monotonic() + seconds
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([self.popen.stdout], [], [], deadline - time.monotonic())
            assert ready, f"no line within {seconds} s, only {text!r}"
            byte = self.popen.stdout.read(1)
            assert byte, f"ended after {text!r}: {self.popen.stderr.read().decode()}"
            text += byte
        return text.decode().strip()

    def tell(self, line=""):
        """Send it a line."""
        self.popen.stdin.write(line.encode() + b"\n")

    def kill(self):
        """``kill -9``, and wait for the end."""
        self.popen.kill()
        self.popen.wait(10)

    def wait(self, seconds=20.0):
        """Its exit status, and what it wrote on standard error."""
        return self.popen.wait(seconds), self.popen.stderr.read().decode()

    def close(self):
        """End it and close its pipes."""
        self.popen.kill()
        self.popen.wait(10)
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            pipe.close()


def read(path):
    """A small file's bytes."""
    with open(path, "rb") as file:
        return file.read()


def descriptors(pid):
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))
