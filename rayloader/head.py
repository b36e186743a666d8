"""Start a private Ray: what a node's guardian runs, as ``python -m rayloader.head``.

The process starts a GCS and a raylet, tells the guardian where they are, and becomes their keeper
(``rayloader.guardian``). Only these two processes are Ray's: no dashboard, no agents, no monitor.
It uses Ray's own ``Node``, because ``ray start`` leaves out none of them and takes fixed ports.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from typing import Any, NoReturn

from rayloader import guardian
from rayloader.config import OBJECT_STORE_BYTES

NEVER = 365 * 24 * 3600
"""A deadline that Ray insists on and that must not come [s]."""

PRIVATE_SETTINGS: dict[str, Any] = {
    # Ray ends a process that has lost its GCS, drivers included, after 60 s: never do.
    "gcs_rpc_server_reconnect_timeout_s": NEVER,
    # The same processes for the whole run: none made in advance, none reaped, none killed.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "kill_idle_workers_interval_ms": 0,
    "memory_monitor_refresh_ms": 0,
    # Ray's own default is 15: a busy node would starve the reader that its trainer waits for.
    "worker_niceness": 0,
    # Nobody looks at them.
    "enable_metrics_collection": False,
    "enable_timeline": False,
    "task_events_report_interval_ms": 0,
}
"""Settings of a private Ray that reach its processes and its drivers."""

PRIVATE_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Despite its name: without it every port of every process listens on all interfaces.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # An actor without GPUs keeps CUDA_VISIBLE_DEVICES as it is; unset, every driver is warned.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
"""Environment of a private Ray's processes, beside its token."""


_SESSION = "s"
_RAYS_OWN = "r"
"""Below the private directory, because Ray opens its directory to everybody (mode 0777)."""
_PYTHON = [sys.executable, "-I", "-S"]
_AGENT_PORTS = {
    "--dashboard_agent_command": (
        "metrics_agent_port",
        "metrics_export_port",
        "dashboard_agent_listen_port",
    ),
    "--runtime_env_agent_command": ("runtime_env_agent_port",),
}
_AGENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # end with the raylet
for path in sys.argv[1:]:  # the raylet waits for these, which say on what ports an agent listens
    with open(path + ".new", "w") as file:
        file.write("1")
    os.rename(path + ".new", path)
while os.getppid() == int(os.environ.get("RAY_RAYLET_PID", os.getppid())):
    signal.pause()
"""


def start_head(directory: str, lifeline: int, report: int) -> NoReturn:
    """Start a private Ray's processes, report its address, and become their keeper.

    Args:
        directory: private and existing; Ray's files go there.
        lifeline: a pipe that ends with the guardian.
        report: a pipe for one JSON object with address, token and node_id, or an error.
    """
    guardian.subreaper()
    threading.Thread(target=_end_with, args=(lifeline, directory), daemon=True).start()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    token = secrets.token_hex(32)
    os.environ.update(PRIVATE_ENVIRONMENT, RAY_AUTH_TOKEN=token)
    # The raylet reads some of them before it hears of them from the GCS.
    os.environ.update({f"RAY_{name}": json.dumps(it) for name, it in PRIVATE_SETTINGS.items()})
    node = _start_node(directory)
    where = {"address": node.address, "token": token, "node_id": node.node_id}
    os.write(report, json.dumps(where).encode() + b"\n")
    watched = [
        f"{processes[0].process.pid}={name}" for name, processes in node.all_processes.items()
    ]
    command = [sys.executable, "-P", "-S", "-m", "rayloader.guardian", "--keep", directory]
    os.execv(sys.executable, [*command, str(lifeline), str(report), *watched])


def _start_node(directory: str) -> Any:
    # As Ray runs where it was installed without its dashboard's dependencies; quicker.
    sys.modules["ray.dashboard.optional_deps"] = None  # type: ignore[assignment]
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Head(Node):  # type: ignore[misc]
        def start_api_server(self, **_: Any) -> None:
            """Leave out the dashboard: a process, a port, a second of start-up."""

    parameters = RayParams(
        node_ip_address="127.0.0.1",
        node_name="127.0.0.1",
        gcs_server_port=0,
        dashboard_agent_listen_port=0,
        num_cpus=0,
        num_gpus=0,
        resources={},
        labels={},
        object_store_memory=OBJECT_STORE_BYTES,
        temp_dir=os.path.join(directory, _RAYS_OWN),
        session_name=_SESSION,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        _system_config=dict(PRIVATE_SETTINGS),
    )
    start = services.start_ray_process

    def start_without_agents(command: list[str], *others: Any, **named: Any) -> Any:
        return start(_without_agents(command, directory), *others, **named)

    services.start_ray_process = start_without_agents
    return Head(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)


def _without_agents(command: list[str], directory: str) -> list[str]:
    """A raylet's command line with placeholders for its two agents.

    The raylet insists on both and dies with either, but only job submission, metrics and runtime
    environments use them, none of which happen here. They are 120 MB, 35 threads, four ports and
    half of the start-up time.
    """
    script = os.path.join(directory, "agent.py")
    node_id = "".join(word.partition("=")[2] for word in command if word.startswith("--node_id="))
    words = []
    for word in command:
        flag = word.partition("=")[0]
        if flag in _AGENT_PORTS:
            with open(script, "w") as file:
                file.write(_AGENT)
            session = os.path.join(directory, _RAYS_OWN, _SESSION)
            files = [os.path.join(session, f"{port}_{node_id}") for port in _AGENT_PORTS[flag]]
            words.append(f"{flag}={subprocess.list2cmdline([*_PYTHON, script, *files])}")
        else:
            words.append(word)
    return words


def _end_with(lifeline: int, directory: str) -> None:
    """While Ray is being started: end with the guardian."""
    os.read(lifeline, 1)
    guardian.end_children()
    guardian.remove(directory)
    os._exit(1)


if __name__ == "__main__":
    start_head(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
