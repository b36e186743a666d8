"""Join a Ray, or start a private one: where the readers of this process live.

``connect`` finds the Ray that :attr:`rayloader.config.Options.ray` names, proves that it answers
before joining it, and joins it within a deadline without touching the caller's logging, signals or
environment. A private Ray belongs to the node's guardian (``rayloader.guardian``), which starts it
(``rayloader.head``).

Ray is imported inside functions only.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rayloader.config import LEAVE_SECONDS, PATIENCE_SECONDS, PROBE_SECONDS, Options
from rayloader.errors import (
    ClusterError,
    ClusterUnreachable,
    OptionError,
    PlacementFailed,
    RayloaderError,
    UsageError,
    chained,
    printable,
)
from rayloader.head import NEVER, PRIVATE_ENVIRONMENT
from rayloader.node import Guardian, RayAddress

NAMESPACE = "rayloader"
"""The Ray namespace of what rayloader joins by itself."""
_DRIVER_ENVIRONMENT = ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
_PRIVATE_CONSTANTS = {"ENABLE_RAY_CLUSTER": False, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": False}
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP2_SETTINGS = 4
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Connection:
    """The Ray that this process has joined.

    Attributes:
        address: ``host:port`` of its GCS.
        node_id: the Ray node that this process is on, hex; readers are placed there.
        private: started by this run's guardian, and ended by it.
        joined: rayloader joined it (and leaves it), not the user's own ``ray.init``.
        same_node: that node's processes are visible from here: they share CPUs and memory.
    """

    address: str
    node_id: str
    private: bool
    joined: bool
    same_node: bool = True


class _State:
    """What this process has: at most one connection and one guardian."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connection: Connection | None = None
        self.guardian: Guardian | None = None
        self.stuck: str | None = None
        self.forked = False


_state = _State()
_abandoned: list[threading.Thread] = []
"""Threads that hang in a call of Ray's, or did."""


def connect(
    choice: str = "auto",
    *,
    run_id: str | None = None,
    start_timeout: float = Options.start_timeout,
    node_cpus: Sequence[int] = (),
) -> Connection:
    """Join the Ray that ``choice`` names; again and from any thread: the same connection.

    Args:
        choice: ``auto``: the one this process has joined, else ``RAY_ADDRESS``, else a private one.
            ``private``: this run's own. ``cluster``: ``RAY_ADDRESS``, else the one running on this
            machine. Or an address, ``host:port``.
        run_id: what this run's ranks on this node have in common; ``None``: this process only.
        start_timeout: until Ray must have been started and joined [s].
        node_cpus: CPUs of a private Ray; empty: all that the control group allows.

    A private Ray that has died is started and joined anew.

    Raises:
        OptionError: ``choice`` is none of these.
        UsageError: this process has joined another Ray, or is a forked child of one that had.
        ClusterUnreachable: no Ray answers there, or it refuses this process.
        ClusterError: the private Ray cannot be started.
    """
    with _state.lock:
        if _state.forked:
            raise UsageError(
                "this process was forked from one that had joined Ray, which Ray does not support: "
                "start it with the 'spawn' method"
            )
        if _state.stuck:
            raise ClusterError(_state.stuck)
        address = _resolve(choice)
        mine = _state.connection
        if mine is not None and _joined_by_hand() is not None:
            _check_choice(choice, address, mine)
            if not mine.private or _still_there(mine, start_timeout):
                return mine
            shutdown()  # it died: start again
        deadline = time.monotonic() + start_timeout
        if (found := _joined_by_hand()) is not None:
            _check_choice(choice, address, found)
            _state.connection = found
        elif address is None:
            _state.connection = _private(run_id, deadline, node_cpus)
        else:
            _state.connection = _join_address(address, choice, deadline)
        return _state.connection


def _check_choice(choice: str, address: str | None, joined: Connection) -> None:
    """Raise unless the Ray that this process has joined is the one that is asked for now."""
    if address is None:
        same = choice != "private" or joined.private
    else:
        same = _same_address(address, joined.address)
    if not same:
        raise UsageError(_already(joined.address, choice))


def guardian(run_id: str | None = None, *, timeout: float = Options.start_timeout) -> Guardian:
    """This process's hold on its node's guardian, which it joins at the first call.

    Args:
        run_id: what this run's ranks on this node have in common; ``None``: this process only.
            The first call decides; later ones get the same guardian.
        timeout: until it must have answered [s].

    Raises:
        ClusterError: it cannot be started.
    """
    with _state.lock:
        if _state.guardian is None or not _state.guardian.alive():
            _forget_guardian()
            _state.guardian = Guardian.join(run_id, timeout)
            _at_exit()
        return _state.guardian


def shutdown() -> None:
    """Leave Ray if rayloader joined it, and the guardian. Idempotent; ``connect`` works again.

    The last process of the run to do this ends the private Ray.
    """
    with _state.lock:
        connection, _state.connection = _state.connection, None
        if connection is not None and connection.joined and not _state.forked:
            _leave()
            _reload_token()
        _forget_guardian()


def place_reader(connection: Connection) -> dict[str, Any]:
    """Options of a reader's actor: on this process's node, asking for no CPU slot."""
    return place_on(connection.node_id)


def place_on(node_id: str) -> dict[str, Any]:
    """Options of an actor on a certain node, asking for no CPU slot, and never restarted by Ray."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }


def promptly(ask: Callable[[], _T]) -> _T:
    """The result of ``ask``, which asks the Ray that was joined, in a thread that may be left.

    Nothing of Ray's own bounds such a call while its GCS is dead or cut off.

    Raises:
        ClusterUnreachable: Ray's address does not answer any more.
        Exception: what ``ask`` raised.
    """
    assert _state.connection is not None
    address = _state.connection.address
    answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="rayloader-ask", daemon=True)
    thread.start()
    try:
        while not concurrent.futures.wait([answer], PATIENCE_SECONDS).done:
            probe(address)
    finally:
        if not answer.done():
            _abandon(thread)
    return answer.result()


def first_said(name: str, value: str) -> str:
    """What the first of all processes in this Ray said under ``name``; ``value`` if it is this one.

    Never waits for the others. Kept by Ray (its internal key-value store) as long as Ray lives.
    """
    from ray.experimental import internal_kv

    def say() -> bool:
        there: bool = internal_kv._internal_kv_put(_key(name), value.encode(), overwrite=False)
        return there

    earlier = said(name) if promptly(say) else None
    return earlier if earlier is not None else value


def said(name: str) -> str | None:
    """What was said under ``name`` with :func:`first_said`; ``None``: nothing yet."""
    from ray.experimental import internal_kv

    value: bytes | None = promptly(lambda: internal_kv._internal_kv_get(_key(name)))
    return value.decode() if value is not None else None


def _key(name: str) -> bytes:
    return f"rayloader/{name}".encode(errors="surrogateescape")


def cluster_error(error: BaseException) -> ClusterError | None:
    """The error of rayloader's that tells one of Ray's about placing or reaching an actor."""
    import ray.exceptions as raised

    if isinstance(error, raised.ActorUnschedulableError):
        return PlacementFailed(f"Ray cannot place the reader on this node: {_first_line(error)}")
    if isinstance(error, raised.RaySystemError | raised.RpcError):
        return ClusterError(f"Ray failed: {_first_line(error)}")
    return None


# Which Ray


def _resolve(choice: str) -> str | None:
    """The address that ``choice`` means; ``None``: a private Ray, or the one already joined."""
    told = os.environ.get("RAY_ADDRESS", "")
    if choice == "private":
        return None
    if choice == "auto" and (not told or _state.connection or _joined_by_hand()):
        return None
    if choice not in ("auto", "cluster"):
        return _address(choice, f"ray={choice!r}")
    if told in ("", "auto", "local"):
        return _running_here()
    return _address(told, f"RAY_ADDRESS={told!r}")


def _address(text: str, said: str) -> str:
    """``host:port`` as it was said.

    Raises:
        OptionError: it is something else; the message begins with ``said``.
    """
    if "://" in text:
        raise OptionError(
            f"{said}: Ray Client cannot be used, its actors share no memory with this process; "
            "run on a node of the cluster and give host:port, or 'cluster'"
        )
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise OptionError(f"{said}: must be 'auto', 'private', 'cluster' or an address host:port")
    return text


def _running_here() -> str:
    """The address of the Ray that ``ray start`` or another ``ray.init`` runs on this machine."""
    where = os.path.join(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    try:
        with open(where) as file:
            return file.read().strip()
    except OSError:
        raise ClusterUnreachable(
            "no Ray runs on this machine, and RAY_ADDRESS names none: start one with "
            "'ray start --head', or choose ray='private'"
        ) from None


def _joined_by_hand() -> Connection | None:
    """The Ray this process is connected to, whoever joined it, without importing ray."""
    ray = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return None
    if _state.connection is not None and _state.connection.joined:
        return _state.connection
    if ray.util.client.ray.is_connected():
        raise UsageError(
            "this process is connected through Ray Client, whose actors share no memory with it: "
            "run on a node of the cluster"
        )
    context = ray.get_runtime_context()
    node_id = context.get_node_id()
    here = node_id in ray._private.services.find_node_ids()
    return Connection(context.gcs_address, node_id, private=False, joined=False, same_node=here)


def _same_address(one: str, other: str) -> bool:
    return one == other or _canonical(one) == _canonical(other)


def _canonical(address: str) -> str:
    """An address as Ray names it: the node's address for localhost."""
    from ray._private import services

    return str(services.canonicalize_bootstrap_address(address))


def _already(address: str, choice: str) -> str:
    return (
        f"this process has already joined the Ray at {address}, so ray={choice!r} is impossible: "
        "use ray='auto', or leave it first (ray.shutdown(), rayloader.shutdown())"
    )


# Joining


def _private(run_id: str | None, deadline: float, cpus: Sequence[int]) -> Connection:
    guard = guardian(run_id, timeout=deadline - time.monotonic())
    try:
        where = guard.ray(max(deadline - time.monotonic(), 0.1), cpus)
        probe(where.address)
        _import_ray(where)
        with _enduring(), _token(where.token), _constants(**_PRIVATE_CONSTANTS), _discreet():
            node_id = _init(where.address, deadline, guard)
    except BaseException:
        _reload_token()
        _forget_guardian()
        raise
    return Connection(where.address, node_id, private=True, joined=True)


def _still_there(connection: Connection, timeout: float) -> bool:
    """Whether a private Ray is the one that was joined; a dead one is replaced by asking."""
    try:
        return _state.guardian is not None and (
            _state.guardian.ray(timeout).address == connection.address
        )
    except ClusterError:
        return False


def _join_address(address: str, choice: str, deadline: float) -> Connection:
    probe(address)
    _import_ray(None)
    canonical = _canonical(address)
    ways: list[contextlib.AbstractContextManager[None]] = [_enduring(), _settings()]
    if canonical != address:
        try:
            probe(canonical)
        except ClusterUnreachable:  # it listens on loopback only
            canonical = address
            ways.append(_constants(ENABLE_RAY_CLUSTER=False))
    if choice == "cluster" and "RAY_AUTH_MODE" not in os.environ and _has_token():
        ways.append(_token(None))
    try:
        with contextlib.ExitStack() as stack:
            for way in ways:
                stack.enter_context(way)
            _within(lambda: _check_gcs(canonical), min(deadline, _soon()), _mute(address))
            node_id = _init(canonical, deadline)
    except BaseException:
        _reload_token()
        raise
    return Connection(canonical, node_id, private=False, joined=True)


def probe(address: str, seconds: float = PROBE_SECONDS) -> None:
    """Prove within ``seconds`` that something at ``host:port`` speaks what Ray speaks.

    Ray's own ``init`` hangs for minutes on a dead address.

    Raises:
        ClusterUnreachable: nothing listens there, or it does not speak HTTP/2.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
            connection.sendall(_HTTP2_PREFACE)
            frame = b""
            while len(frame) < 4:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                part = connection.recv(64)
                if not part:
                    break
                frame += part
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ClusterUnreachable(f"no Ray answers at {address}: {why}") from error
    if frame[3:4] != bytes([_HTTP2_SETTINGS]):
        raise ClusterUnreachable(
            f"what listens at {address} is no Ray: it does not speak gRPC "
            "(Ray's port is 6379 unless chosen otherwise; 8265 is its dashboard)"
        )


def _check_gcs(address: str) -> None:
    """Ask the GCS for its nodes, and find one that is here.

    Raises:
        ClusterUnreachable: it is no GCS, refuses this process, or has no node on this machine.
    """
    from ray._private import services

    try:
        nodes = _core().GcsClient(address=address).get_all_node_info(timeout=PROBE_SECONDS)
    except Exception as error:
        raise _refusal(address, error) from chained(error)
    here = services.find_node_ids()
    if not any(node_id.hex() in here for node_id in nodes):
        raise ClusterUnreachable(
            f"this machine is no node of the Ray at {address}, so no reader can share memory with "
            f"this process: run 'ray start --address={address}' here first"
        )


def _refusal(address: str, error: BaseException) -> ClusterUnreachable:
    text = _first_line(error)
    if "uthenticat" in type(error).__name__ + str(error) or "oken" in text:
        return ClusterUnreachable(
            f"the Ray at {address} asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
            "(or RAY_AUTH_TOKEN_PATH) as its own processes have them"
        )
    if "not found" in text or "nimplemented" in text:
        return ClusterUnreachable(f"what listens at {address} is no Ray head: {text}")
    return ClusterUnreachable(f"the Ray at {address} cannot be joined: {text}")


def _init(address: str, deadline: float, guard: Guardian | None = None) -> str:
    """``ray.init`` in a thread, because nothing else bounds it.

    Args:
        address: that answers.
        deadline: by the monotonic clock [s].
        guard: of a private Ray, whose death ends the attempt. No hook may ask a private Ray for a
            runtime environment, for which it has no agent.

    Returns:
        The id of this process's node, hex.
    """

    def join() -> str:
        import ray

        job = ray.job_config.JobConfig()
        job._py_driver_sys_path = _EncodablePaths()
        try:
            with _printable_driver():
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    job_config=job,
                    log_to_driver=False,
                    configure_logging=False,
                    _skip_env_hook=guard is not None,
                )
        except Exception as error:
            raise _refusal(address, error) from chained(error)
        return str(ray.get_runtime_context().get_node_id())

    with _undisturbed():
        node_id = _within(join, deadline, _mute(address), _ray_shutdown, guard)
    _undo_excepthook()
    _at_exit()
    return node_id


def _within(
    act: Callable[[], _T],
    deadline: float,
    late: ClusterError,
    undo: Callable[[], object] = int,
    guard: Guardian | None = None,
) -> _T:
    """The result of ``act``, run in a thread that is abandoned at the deadline or by Ctrl-C.

    It is also abandoned when ``guard`` dies meanwhile, and a private Ray with it.

    An abandoned ``act`` that succeeds after all is undone. Until then nothing else can be joined.
    """
    result: list[_T] = []
    failure: list[BaseException] = []
    turn = threading.Lock()
    abandoned = False

    def run() -> None:
        try:
            made = act()
        except BaseException as error:
            failure.append(error)
        with turn:
            if not failure:
                result.append(made)
            if abandoned:
                if result:
                    undo()
                _state.stuck = None

    thread = threading.Thread(target=run, name="rayloader-join", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and time.monotonic() < deadline and (not guard or guard.alive()):
            thread.join(min(max(deadline - time.monotonic(), 0.0), 0.25))
    finally:
        with turn:
            abandoned = not result and not failure
            if abandoned:
                _state.stuck = f"{late} (an earlier attempt to join it still hangs in this process)"
                _abandon(thread)
    if abandoned:
        if guard is not None:
            guard.check()
        raise late
    if failure:
        raise failure[0]
    return result[0]


def _mute(address: str) -> ClusterUnreachable:
    return ClusterUnreachable(f"the Ray at {address} takes connections but does not answer")


def _soon() -> float:
    return time.monotonic() + 2 * PROBE_SECONDS


def _leave() -> None:
    """``ray.shutdown``, which may hang when Ray is half dead."""
    late = ClusterError("Ray does not let go of this process")
    try:
        with _undisturbed():
            _within(_ray_shutdown, time.monotonic() + LEAVE_SECONDS, late)
    except RayloaderError:
        _forget_rays_exit()


def _ray_shutdown() -> None:
    import ray

    ray.shutdown()


# Leaving the process as it was


def _import_ray(where: RayAddress | None) -> None:
    """Import ray with what it reads at import in place."""
    if "ray" in sys.modules:
        return
    # In a notebook it would tell the user to install widgets.
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    names = _DRIVER_ENVIRONMENT if where is not None else _DRIVER_ENVIRONMENT[:1]
    changes = {name: PRIVATE_ENVIRONMENT[name] for name in names}
    # A late call of some thread, when Ray has been left, would start another one.
    changes["RAY_ENABLE_AUTO_CONNECT"] = "0"
    with _environment(changes):
        import ray  # noqa: F401


def _undo_excepthook() -> None:
    """Have an uncaught error printed as it was before Ray was imported.

    Ray's hook first tells the GCS, for ever if that is dead: the process would neither say what is
    wrong nor end.
    """
    from ray._private import worker

    if sys.excepthook is worker.custom_excepthook:
        sys.excepthook = worker.normal_excepthook


@contextlib.contextmanager
def _token(token: str | None) -> Iterator[None]:
    """Let Ray read its token, also when it was imported long ago; it remembers what it has read.

    Args:
        token: of a private Ray; ``None``: the user's own (``~/.ray/auth_token``).
    """
    changes = {"RAY_AUTH_MODE": "token"}
    if token is not None:
        changes["RAY_AUTH_TOKEN"] = token
    with _environment(changes):
        _reload_token()
        yield


def _enduring() -> contextlib.AbstractContextManager[None]:
    """Let a process that has lost its GCS live: Ray would end it after a minute, saying nothing."""
    return _environment({"RAY_gcs_rpc_server_reconnect_timeout_s": str(NEVER)})


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Let Ray read its settings, also when it was imported long ago."""
    _reload_token()
    yield


def _reload_token() -> None:
    """Let Ray read its settings and its token anew from the environment."""
    if "ray._raylet" in sys.modules:
        _core().Config.initialize("")
        _core().AuthenticationTokenLoader.instance().reset_cache()


def _has_token() -> bool:
    return bool(_core().AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def _core() -> Any:
    """Ray's C++ side, whose stub file does not name all of it."""
    return importlib.import_module("ray._raylet")


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        _put(before)


def _put(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _discreet() -> Iterator[None]:
    """Keep a private Ray from writing its own account of a dead reader to the user's output."""
    from ray._private import worker

    before = getattr(worker, "listen_error_messages", None)
    if before is None or os.environ.get("RAYLOADER_DEBUG"):
        yield
        return
    worker.listen_error_messages = lambda *_: None
    try:
        yield
    finally:
        worker.listen_error_messages = before


@contextlib.contextmanager
def _constants(**changes: bool) -> Iterator[None]:
    """What Ray read from the environment when it was imported, changed for a while.

    ``ENABLE_RAY_CLUSTER=False`` lets it join at 127.0.0.1, which it otherwise turns into the
    machine's own address; ``RAY_ENABLE_UV_RUN_RUNTIME_ENV=False`` keeps a driver under ``uv run``
    from asking for a runtime environment, for which a private Ray has no agent.
    """
    from ray._private import ray_constants

    before = {name: getattr(ray_constants, name) for name in changes}
    for name, value in changes.items():
        setattr(ray_constants, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(ray_constants, name, value)


class _EncodablePaths(list[str]):
    """Takes no path that is not UTF-8: the reader of a private Ray needs none of them."""

    def extend(self, paths: Iterable[str]) -> None:
        """Add those that can be encoded."""
        super().extend(path for path in paths if printable(path) == path)


@contextlib.contextmanager
def _printable_driver() -> Iterator[None]:
    """Let Ray have this process's script and command line, of which it takes UTF-8 only."""
    from ray._private import utils

    main, entrypoint = sys.modules["__main__"], utils.get_entrypoint_name
    script = getattr(main, "__file__", None)
    named = isinstance(script, str) and printable(script) != script
    utils.get_entrypoint_name = lambda: printable(entrypoint())
    if named:
        main.__file__ = printable(str(script))
    try:
        yield
    finally:
        utils.get_entrypoint_name = entrypoint
        if named:
            main.__file__ = script


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Undo what ``ray.init`` does to the process: its logger, its warnings, its signals."""
    log = logging.getLogger("ray")
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    log.setLevel(logging.ERROR)
    signals = _Signals()
    try:
        with _environment({name: PRIVATE_ENVIRONMENT[name] for name in _DRIVER_ENVIRONMENT[:1]}):
            yield
    finally:
        signals.put_back()
        log.handlers[:], log.level, log.propagate = handlers, level, propagate


class _Signals:
    """The C-level signal actions, which Ray's core replaces behind Python's back."""

    _NUMBERS = (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD,
        signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP,
    )  # fmt: skip

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._actions = {}
        for number in self._NUMBERS:
            action = ctypes.create_string_buffer(256)  # a struct sigaction is smaller
            if self._libc.sigaction(int(number), None, action) == 0:
                self._actions[number] = action

    def put_back(self) -> None:
        for number, action in self._actions.items():
            self._libc.sigaction(int(number), action, None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _forget_rays_exit() -> None:
    """Keep Ray from shutting itself down once more at exit: nothing would bound that."""
    atexit.unregister(sys.modules["ray"].shutdown)


def _forget_guardian() -> None:
    held, _state.guardian = _state.guardian, None
    if held is not None:
        held.close()


def _at_exit() -> None:
    """Leave at exit, before Ray's own shutdown, which nothing bounds: the last comes first."""
    atexit.unregister(_finish)
    atexit.register(_finish)


def _abandon(thread: threading.Thread) -> None:
    """Nobody waits any more for this thread, which hangs in Ray."""
    _abandoned.append(thread)
    _at_exit()


def _finish() -> None:
    shutdown()
    if any(thread.is_alive() for thread in _abandoned):
        # Ray's C++ objects must not be destroyed under it, which would be a crash. ``exit`` calls
        # ``_exit`` with its status before it destroys them, when Python has finished.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


def _in_child() -> None:
    """A forked child cannot use its parent's Ray, and must not end it at its own exit."""
    forked = _state.forked or _state.connection is not None
    if forked and "ray" in sys.modules:
        _forget_rays_exit()
    _state.__init__()  # type: ignore[misc]  # the lock may have been held
    _state.forked = forked


os.register_at_fork(after_in_child=_in_child)
