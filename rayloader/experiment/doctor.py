"""Is this machine, and this storage, ready? Checks of one node, each with its cure.

Nothing here says a secret: of proxies and credentials only the names of variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import http.client
import itertools
import mmap
import os
import platform
import resource
import shutil
import socket
import ssl
import stat
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from rayloader import limits
from rayloader.catalog import Catalog, root_of_source
from rayloader.config import (
    MIB,
    OBJECT_STORE_BYTES,
    PAGE,
    RAY_ADDRESS_SPACE,
    READER_BYTES,
    USUAL_PROCESSES,
)
from rayloader.errors import RayloaderError, counted, printable
from rayloader.experiment.pagecache import cached_share, forget
from rayloader.experiment.report import version
from rayloader.storage.access import Access
from rayloader.storage.listing import PosixLister
from rayloader.storage.object_listing import lister_of
from rayloader.storage.uri import is_object, location

State = Literal["ok", "warning", "bad", "unknown"]
SAMPLED = 64
"""Entries of a source that are looked at [entries]."""
RAYS_FILES = 200
"""Descriptors of a reader beside those of its reads [files]."""
TMPDIR_LETTERS = 43
"""Below a longer directory Ray's sockets have names that the kernel refuses [characters]."""
TMPDIR_BYTES = 1 << 30
"""Ray's logs and what it spills want so much room [bytes]."""
CLOCK_SECONDS = 300.0
"""S3 requests are refused by servers whose clock differs by three times this [s]."""
CONNECT_SECONDS = 3.0
CERTIFICATE_DAYS = 14.0
"""Certificates that end before are told [days]."""
_PACKAGES = ("rayloader", "ray", "torch", "pyarrow", "numpy")


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        check: its name.
        state: ``ok``; ``warning``: it works, but slower or less safely; ``bad``: it does not work;
            ``unknown``: it cannot be told here.
        says: what was found, with figures.
        cure: what to do; empty where nothing is wrong.
    """

    check: str
    state: State
    says: str
    cure: str = ""

    def asdict(self) -> dict[str, str]:
        """Its parts by name."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the machine is to be ready for.

    Attributes:
        ranks: on this node, > 0.
        concurrency: reads in flight per rank [reads].
        memory_bytes: of batches per rank [bytes].
    """

    ranks: int
    concurrency: int
    memory_bytes: int


def machine(wanted: Wanted) -> list[Finding]:
    """The checks of this node, whatever is to be read."""
    checks: list[Callable[[Wanted], Finding]] = [
        _versions,
        _cpus,
        _open_files,
        _processes,
        _address_space,
        _locked_memory,
        _memory,
        _shared_memory,
        _temporary,
        _home,
        _remove_ipc,
        _proxies,
    ]
    return [check(wanted) for check in checks]


def _versions(_: Wanted) -> Finding:
    found = {name: version(name) for name in _PACKAGES}
    missing = [name for name, known in found.items() if known is None and name != "rayloader"]
    says = f"python {platform.python_version()}, " + ", ".join(
        f"{name} {known}" for name, known in found.items() if known is not None
    )
    if missing:
        return Finding(
            "versions",
            "bad",
            f"{says}; missing: {', '.join(missing)}",
            "install rayloader with pip, which brings them",
        )
    return Finding("versions", "ok", f"{says}, kernel {platform.release()}")


def _cpus(wanted: Wanted) -> Finding:
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cpu_quota()
    says = f"{allowed} of {there} CPUs may be used"
    if quota is not None:
        says += f", {quota:g} at a time (the control group's quota)"
    usable = min(allowed, quota if quota is not None else allowed)
    if usable < 2 * wanted.ranks and usable < there:
        return Finding(
            "CPUs",
            "warning",
            f"{says}, for {counted(wanted.ranks, 'rank')} and the readers",
            "widen the mask (mpirun --bind-to none, cpus='node'), or the quota",
        )
    if usable < 2 * wanted.ranks:
        return Finding(
            "CPUs",
            "warning",
            f"{says}, for {counted(wanted.ranks, 'rank')} and the readers",
            "readers and trainers will share CPUs: fewer ranks per node",
        )
    return Finding("CPUs", "ok", says)


def _cpu_quota() -> float | None:
    """CPUs that the control groups allow at a time; ``None``: they set no limit."""
    quotas = []
    for group, kind in limits.groups("cpu", "/sys/fs/cgroup", "/proc/self/cgroup"):
        with contextlib.suppress(OSError, ValueError):
            if kind == 2:
                most, period = _read(f"{group}/cpu.max").split()
            else:
                most = _read(f"{group}/cpu.cfs_quota_us")
                period = _read(f"{group}/cpu.cfs_period_us")
            if int(most) > 0:
                quotas.append(int(most) / int(period))
    return min(quotas, default=None)


def _open_files(wanted: Wanted) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted.concurrency + RAYS_FILES
    says = f"a process may open {soft:,} files (ulimit -n), a reader needs {needed:,}"
    if soft >= needed:
        return Finding("open files", "ok", says)
    return Finding("open files", "bad", says, f"ulimit -n {max(needed, min(hard, 65536))}")


def _processes(wanted: Wanted) -> Finding:
    few = limits.too_few_processes(USUAL_PROCESSES + 80 * wanted.ranks)
    return (
        Finding("processes", "bad", few, "ulimit -u, or pids.max of the control group")
        if few
        else Finding("processes", "ok", "enough processes and threads may be started")
    )


def _address_space(wanted: Wanted) -> Finding:
    little = limits.too_little_address_space(wanted.memory_bytes + RAY_ADDRESS_SPACE)
    return (
        Finding("address space", "bad", little, "ulimit -v unlimited")
        if little
        else Finding("address space", "ok", "a process may map what it takes")
    )


def _locked_memory(wanted: Wanted) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= wanted.memory_bytes:
        return Finding("locked memory", "ok", "a process may lock as much as its batches take")
    return Finding(
        "locked memory",
        "ok",
        f"a process may lock {soft >> 10:,} KiB (ulimit -l), which is enough: only RDMA needs more",
    )


def _memory(wanted: Wanted) -> Finding:
    free, where = limits.memory_free(), "the memory control group has"
    available = _available_memory()
    if available < free:
        free, where = available, "the machine has"
    needed = wanted.ranks * (wanted.memory_bytes + READER_BYTES)
    take = "ranks take" if wanted.ranks > 1 else "rank takes"
    says = f"{where} {free / 1e9:.1f} GB free, {wanted.ranks} {take} {needed / 1e9:.1f} GB"
    if free >= needed:
        return Finding("memory", "ok", says)
    fits = max((free // wanted.ranks - READER_BYTES) // MIB, 1)
    return Finding("memory", "bad", says, f"memory_bytes of at most {fits} MiB, or fewer ranks")


def _available_memory() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


def _shared_memory(_: Wanted) -> Finding:
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(
            "/dev/shm",
            "bad",
            f"it cannot be used: {error.strerror}",
            "mount a tmpfs there: Ray's object store lives in it",
        )
    free = room.f_bavail * room.f_frsize
    says = f"{free / MIB:,.0f} MiB free; batches do not go through it, Ray's object store does"
    if free >= OBJECT_STORE_BYTES + (16 << 20):
        return Finding("/dev/shm", "ok", says)
    return Finding("/dev/shm", "bad", says, "docker run --shm-size=256m, or a larger tmpfs")


def _temporary(_: Wanted) -> Finding:
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    says = f"{printable(place)} has {free / 1e9:.1f} GB free"
    if free < TMPDIR_BYTES:
        return Finding("TMPDIR", "warning", says, "make room there, or set TMPDIR elsewhere")
    if len(place) > TMPDIR_LETTERS:
        return Finding(
            "TMPDIR",
            "warning",
            f"{says}; its name has {len(place)} characters",
            "rayloader then uses /tmp for Ray's sockets; a shorter TMPDIR",
        )
    return Finding("TMPDIR", "ok", says)


def _home(_: Wanted) -> Finding:
    home = os.path.expanduser("~")
    if os.access(home, os.W_OK | os.X_OK):
        return Finding("HOME", "ok", f"{printable(home)} can be written")
    return Finding(
        "HOME",
        "warning",
        f"{printable(home)} cannot be written",
        "set HOME: a Ray with a token of its own keeps it there",
    )


def _remove_ipc(_: Wanted) -> Finding:
    if os.getuid() < 1000 or not os.path.isdir("/run/systemd/seats"):
        return Finding("RemoveIPC", "ok", "logind removes no shared memory of this user")
    for path in ("/etc/systemd/logind.conf", *_drop_ins("/etc/systemd/logind.conf.d")):
        with contextlib.suppress(OSError):
            if any(
                line.replace(" ", "").lower() == "removeipc=no" for line in _read(path).splitlines()
            ):
                return Finding("RemoveIPC", "ok", f"{path} says RemoveIPC=no")
    return Finding(
        "RemoveIPC",
        "warning",
        "logind may remove Ray's object store when this user's last session ends",
        "RemoveIPC=no in logind.conf, or loginctl enable-linger",
    )


def _drop_ins(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [os.path.join(directory, name) for name in sorted(os.listdir(directory))]
    return []


def _proxies(_: Wanted) -> Finding:
    names = [
        name
        for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
        if os.environ.get(name) or os.environ.get(name.upper())
    ]
    if not names:
        return Finding("proxies", "ok", "no proxy is set")
    said = ", ".join(names)
    around = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if any(part.strip() in ("*", "127.0.0.1", "localhost") for part in around.split(",")):
        return Finding("proxies", "ok", f"{said} set, and NO_PROXY names this machine")
    return Finding(
        "proxies",
        "warning",
        f"{said} set, and NO_PROXY leaves out 127.0.0.1",
        "NO_PROXY=127.0.0.1,localhost and the endpoint's host",
    )


# The source


def sample_of(source: Any, access: Access) -> Catalog:
    """The first entries of a source, without listing all of it.

    Raises:
        RayloaderError: it cannot be listed; the class and the message say why.
    """
    root = root_of_source(source)
    if is_object(root) and isinstance(source, str | bytes):
        found = list(
            itertools.islice(lister_of(location(root), access.with_keys()).list(root), SAMPLED)
        )
    elif isinstance(source, str | bytes) and os.path.isdir(source):
        root = os.path.abspath(os.fsencode(source))
        found = list(itertools.islice(PosixLister().list(root), SAMPLED))
    else:
        catalog = Catalog.from_source(source, access=access)
        entries = np.arange(min(SAMPLED, len(catalog)))
        return Catalog.of_files(catalog.keys_at(entries), catalog.root)
    return Catalog.of_files([key for key, _ in found], root)


def files(sample: Catalog, out: str | None = None) -> list[Finding]:
    """The checks of files, of which a few are given.

    Args:
        sample: some of them.
        out: where results are to be written; ``None``: nowhere.
    """
    paths = [os.path.join(sample.root, key) for key in sample.keys_at(np.arange(len(sample)))]
    unreadable = {path: why for path in paths if (why := _unreadable(path))}
    if unreadable:
        path, why = next(iter(unreadable.items()))
        says = f"{len(unreadable)} of {len(paths)} cannot be read: "
        return [
            Finding(
                "files",
                "bad",
                f"{says}{printable(os.fsdecode(path))}: {why}",
                "permissions of the user who runs the ranks; take out what is no file",
            )
        ]
    found = [Finding("files", "ok", f"{len(paths)} looked at, all can be read")]
    return [
        *found,
        _latency(paths),
        _direct(paths),
        _forgets(sample, paths),
        _dense(paths),
        *_apart(paths[0], out),
        *io_limit(),
    ]


def _unreadable(path: bytes) -> str:
    """Why a file cannot be read; nothing where it can be. Never waits, as for a FIFO's writer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or str(error)
    try:
        return "" if stat.S_ISREG(os.fstat(fd).st_mode) else "it is no regular file"
    finally:
        os.close(fd)


def _latency(paths: Sequence[bytes]) -> Finding:
    """How long opening and reading the first page of a file takes, not from the page cache."""
    times = []
    for path in paths[:16]:
        forget(path)
        began = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            file.read(PAGE)
        times.append(time.perf_counter() - began)
    return Finding(
        "latency",
        "ok",
        f"opening and reading a page takes {statistics.median(times) * 1e3:.2f} ms "
        f"(median of {len(times)}, the slowest {max(times) * 1e3:.2f} ms)",
    )


def _direct(paths: Sequence[bytes]) -> Finding:
    with mmap.mmap(-1, PAGE) as page:
        try:
            fd = os.open(paths[0], os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.preadv(fd, [page], 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return Finding("O_DIRECT", "unknown", f"not tried: {error.strerror}")
            return Finding(
                "O_DIRECT",
                "warning",
                "this file system refuses it",
                "direct=False, or direct='fallback'; drop_cache=True reads cold",
            )
    return Finding("O_DIRECT", "ok", "this file system takes it")


def _forgets(sample: Catalog, paths: Sequence[bytes]) -> Finding:
    for path in paths:
        forget(path)
    share = cached_share(sample)
    if share is None:
        return Finding(
            "page cache", "unknown", "the kernel does not say what it holds of these files"
        )
    if share > 0.05:
        return Finding(
            "page cache",
            "warning",
            f"after fadvise(DONTNEED) it still holds {share:.0%} of the files",
            "cold reads need O_DIRECT or another mount here; new files: sync first",
        )
    return Finding("page cache", "ok", "it forgets a file when asked (drop_cache, --cache cold)")


def _dense(paths: Sequence[bytes]) -> Finding:
    size = on_disk = 0
    for path in paths:
        status = os.stat(path)
        size, on_disk = size + status.st_size, on_disk + status.st_blocks * 512
    if size and on_disk < 0.9 * size:
        return Finding(
            "on disk",
            "warning",
            f"the files take {on_disk / size:.0%} of their size: sparse or compressed",
            "figures are of less than these bytes: make data with rayloader generate",
        )
    return Finding("on disk", "ok", "the files are stored in full: neither sparse nor compressed")


def _apart(path: bytes, out: str | None) -> Iterator[Finding]:
    if out is None:
        return
    place = os.path.abspath(out)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    if os.stat(place).st_dev == os.stat(path).st_dev:
        yield Finding(
            "results",
            "warning",
            "data and results are on one file system",
            "--out elsewhere, so that writing does not disturb reading",
        )
    else:
        yield Finding("results", "ok", "data and results are on different file systems")


def io_limit(
    mount: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup"
) -> Iterator[Finding]:
    """Whether control groups limit what a device reads, by bytes or by operations per second.

    Args:
        mount: where the control groups are.
        membership: the file that says which of them this process is in.
    """
    said = [
        f"{device} to {most} {unit}"
        for group, kind in limits.groups("blkio", mount, membership)
        for device, most, unit in (_limits_2(group) if kind == 2 else _limits_1(group))
    ]
    if said:
        yield Finding(
            "I/O limit",
            "warning",
            f"the control group limits reading from device {', '.join(said)}",
            "take the limit away (io.max, blkio.throttle.read_*_device; docker: --device-read-bps, "
            "--device-read-iops) if figures are to be the storage's own",
        )
    else:
        yield Finding("I/O limit", "ok", "no control group is known to limit reading")


def _limits_2(group: str) -> Iterator[tuple[str, str, str]]:
    """(major:minor, limit, its unit) of a group of version 2, where reading is limited."""
    with contextlib.suppress(OSError):
        for line in _read(f"{group}/io.max").splitlines():
            device, *pairs = line.split()
            for name, _, most in (pair.partition("=") for pair in pairs):
                if name in _UNITS and most != "max":
                    yield device, most, _UNITS[name]


def _limits_1(group: str) -> Iterator[tuple[str, str, str]]:
    """The same of version 1, which has a file for each."""
    for name, unit in (("bps", _UNITS["rbps"]), ("iops", _UNITS["riops"])):
        with contextlib.suppress(OSError):
            for line in _read(f"{group}/blkio.throttle.read_{name}_device").splitlines():
                device, most = line.split()
                yield device, most, unit


_UNITS = {"rbps": "bytes/s", "riops": "reads/s"}


# Object storage


def endpoint(access: Access, bucket: str = "") -> list[Finding]:
    """The checks of an object storage's endpoint, before anything is asked of it.

    Args:
        access: where requests go, and in whose name.
        bucket: that they are for.
    """
    try:
        url = urlsplit(access.destination)
        host, port = url.hostname or "", url.port or _PORTS[url.scheme]
        addresses: set[tuple[Any, int]] = {
            (it[4], it[0]) for it in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        }
    except OSError as error:
        cure = "endpoint_url or AWS_ENDPOINT_URL; the name server"
        return [Finding("endpoint", "bad", f"{host} has no address: {error}", cure)]
    except (ValueError, KeyError):
        says = f"{access.destination} is no address of a server"
        return [Finding("endpoint", "bad", says, "endpoint_url=http://host:port, or https://…")]
    found = _reached(access, host, port, addresses)
    if found[0].state == "bad":
        return found
    if access.is_guessed:
        found.append(Finding("endpoint chosen", "warning", access.warning, "AWS_ENDPOINT_URL"))
    found += _bucket(access, host, bucket) if bucket else []
    found.append(_keys(access))
    if found[0].check == "endpoint":
        found += _speaks(access, url.scheme, host, port)
    return found


_PORTS = {"http": 80, "https": 443}


def _reached(
    access: Access, host: str, port: int, addresses: set[tuple[Any, int]]
) -> list[Finding]:
    """Whether a connection can be made from here; of a proxy's way nothing can be told."""
    proxied = urlsplit(access.destination).scheme in urllib.request.getproxies()
    if proxied and not urllib.request.proxy_bypass(host):
        says = f"a proxy is set, and requests to {host} may go through it"
        cure = f"NO_PROXY={host}, unless there is no other way to it"
        return [Finding("endpoint's proxy", "warning", says, cure)]
    silent = [str(address[0]) for address, family in addresses if not _connects(address, family)]
    if len(silent) == len(addresses):
        says = f"nothing listens at {host}:{port}"
        return [Finding("endpoint", "bad", says, "is the server up? a firewall?")]
    if silent:
        says = f"{host}: no answer from {', '.join(silent)}"
        cure = "connections wait for them first: mend the name, or IPv6"
        return [Finding("endpoint", "warning", says, cure)]
    says = f"{access.destination}, region {access.region_in_force}"
    return [Finding("endpoint", "ok", says)]


def _bucket(access: Access, host: str, bucket: str) -> Iterator[Finding]:
    """Requests name the bucket in their path; an endpoint that names it too means another."""
    if host.lower().startswith(f"{bucket.lower()}."):
        yield Finding(
            "path style",
            "bad",
            f"{host} names the bucket, and so does the path of every request (/{bucket}/key)",
            f"the endpoint without it: {host[len(bucket) + 1 :]}",
        )
    else:
        says = f"requests are for {access.destination}/{bucket}/key"
        yield Finding("path style", "ok", says)


def _keys(access: Access) -> Finding:
    if access.with_keys().has_keys:
        return Finding("credentials", "ok", "there is a pair of keys")
    return Finding(
        "credentials",
        "bad",
        "no credentials are found",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    )


def _connects(address: tuple[Any, ...], family: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS)
        return connection.connect_ex(address) == 0


def _speaks(access: Access, scheme: str, host: str, port: int) -> Iterator[Finding]:
    """TLS and the clock, by a request that signs nothing and needs no key."""
    if scheme == "http":
        yield Finding("TLS", "ok", "not used: keys are not sent, but data are not encrypted")
        yield from _clock(http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS))
        return
    cure = "ca_bundle or AWS_CA_BUNDLE: a file with the authority that signed the server's"
    try:
        trusted = ssl.create_default_context(cafile=access.ca_bundle or None)
        with (
            socket.create_connection((host, port), CONNECT_SECONDS) as plain,
            trusted.wrap_socket(plain, server_hostname=host) as secured,
        ):
            until = str((secured.getpeercert() or {}).get("notAfter"))
    except ssl.SSLCertVerificationError as error:
        yield Finding("TLS", "bad", f"its certificate is refused: {error.verify_message}", cure)
        return
    except OSError as error:
        yield Finding("TLS", "bad", f"no secure connection: {error.strerror or error}", cure)
        return
    days = (ssl.cert_time_to_seconds(until) - time.time()) / 86400
    yield (
        Finding("TLS", "ok", f"its certificate is trusted, for another {days:.0f} days")
        if days > CERTIFICATE_DAYS
        else Finding("TLS", "warning", f"its certificate ends in {days:.1f} days", "renew it")
    )
    connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=trusted)
    yield from _clock(connection)


def _clock(connection: http.client.HTTPConnection) -> Iterator[Finding]:
    """Compare this machine's clock with the server's."""
    try:
        connection.request("HEAD", "/")
        date = connection.getresponse().getheader("Date")
        away = time.time() - parsedate_to_datetime(date).timestamp() if date else None
    except (OSError, ValueError, http.client.HTTPException):
        return
    finally:
        connection.close()
    if away is not None and abs(away) > CLOCK_SECONDS:
        yield Finding(
            "clock",
            "bad",
            f"this clock is {away:+.0f} s from the server's",
            "set it (chrony): signatures are refused after 15 minutes",
        )
    elif away is not None:
        yield Finding("clock", "ok", f"this clock is {abs(away):.0f} s from the server's")


def listed(source: Any, access: Access) -> tuple[Catalog | None, Finding]:
    """Some entries of a source, and whether it could be listed."""
    name = printable(os.fsdecode(root_of_source(source)))
    try:
        sample = sample_of(source, access)
    except RayloaderError as error:
        says, cure = f"{type(error).__name__}: {error}", error.cure.replace("``", "")
        return None, Finding("source", "bad", says, cure)
    if not len(sample):
        return None, Finding("source", "bad", f"{name} holds nothing to read", "another source")
    more = " or more" if len(sample) == SAMPLED else ""
    entries = "entry" if len(sample) == 1 else "entries"
    return sample, Finding("source", "ok", f"{name}: {len(sample)}{more} {entries}")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
