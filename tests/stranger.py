"""Somebody who reaches ports and has no token: calls whatever there is, and says what answered.

``python tests/stranger.py HOST PORT ...`` prints one JSON object: what became of each port. It runs
without Ray's environment, wherever the test puts it.
"""

from __future__ import annotations

import functools
import http.client
import importlib
import json
import os
import pkgutil
import re
import socket
import sys

HOSTS_WORD = 20.0
"""How long a busy host may take for an answer [s]."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HTTP2_SETTINGS = b"\x04"
WRONG = "f" * 64
TOKENS = ({}, {"authorization": f"Bearer {WRONG}"})
"""What is brought along instead of the token."""
NODE = ("node_id", "0" * 56)
"""RaySyncer/StartSync ends Ray's processes where it is left out, before they ask for the token."""
REFUSED = ("UNAUTHENTICATED", "UNIMPLEMENTED")
PATHS = (
    "/", "/metrics", "/api/version", "/api/healthz", "/api/local_raylet_healthz", "/api/jobs/",
    "/api/job_agent/jobs/", "/api/healthz/../job_agent/jobs/", "//api/job_agent/jobs/", "/nodes",
    "/api/cluster_status", "/api/v0/actors", "/api/serve/applications/", "/logs", "/events",
    "/worker/traceback", "/get_or_create_runtime_env", "/delete_runtime_env_if_possible",
)  # fmt: skip


def knock(host, port):
    """What a port does: ``closed``, something ``odd``, or ``grpc`` or ``http`` and its answers."""
    try:
        with socket.create_connection((host, port), HOSTS_WORD) as one:
            one.sendall(PREFACE)
            one.settimeout(HOSTS_WORD)
            answer = one.recv(64)
    except ConnectionRefusedError:
        return {"closed": True}
    except OSError as error:
        return {"odd": repr(error)}
    if not answer:
        return {"odd": "it hangs up"}
    if answer[3:4] == HTTP2_SETTINGS:
        return {"grpc": call_everything(f"{host}:{port}")}
    return {"http": ask_everything(host, port)}


@functools.cache
def methods():
    """Every gRPC method that is named in Ray's Python files or in the raylet."""
    import ray
    import ray.core.generated as generated

    here = os.path.dirname(ray.__file__)
    with open(f"{here}/core/src/ray/raylet/raylet", "rb") as file:
        found = re.findall(rb"/[a-z0-9_.]+\.[A-Z][A-Za-z]+/[A-Z][A-Za-z]+", file.read())
    names = {name.decode() for name in found}
    for module in pkgutil.iter_modules(generated.__path__):
        if module.name.endswith("_pb2"):
            described = importlib.import_module(f"{generated.__name__}.{module.name}").DESCRIPTOR
            for service in described.services_by_name.values():
                names |= {f"/{service.full_name}/{one.name}" for one in service.methods}
    return sorted(names)


def call_everything(address):
    """How many methods were refused for want of the token, and which were not, with their status.

    Every call is one empty message, which to a server is a unary call as well as a stream.
    """
    import grpc

    same = lambda message: message  # noqa: E731
    refused, answered = set(), {}
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for brought in TOKENS:
            for method in methods():
                call = channel.stream_stream(method, same, same)(
                    iter([b""]), timeout=HOSTS_WORD, metadata=[*brought.items(), NODE]
                )
                try:
                    next(call)
                    answered[method] = "OK"
                except StopIteration:
                    answered[method] = "OK"
                except grpc.RpcError as error:
                    if error.code().name not in REFUSED:
                        answered[method] = error.code().name
                    elif error.code().name == REFUSED[0]:
                        refused.add(method)
                call.cancel()
    return {"refused": len(refused), "answered": answered}


def ask_everything(host, port):
    """How many requests were refused for want of the token, which were not, and what /metrics has.

    A method that a server has not at all (405) is neither.
    """
    refused, answered, metrics = 0, {}, ""
    for brought in TOKENS:
        for method in ("GET", "POST", "DELETE"):
            for path in PATHS:
                connection = http.client.HTTPConnection(host, port, timeout=HOSTS_WORD)
                try:
                    connection.request(method, path, headers=brought)
                    answer = connection.getresponse()
                    if answer.status == 200 and path == "/metrics":
                        metrics = answer.read().decode()
                finally:
                    connection.close()
                if answer.status in (401, 403):
                    refused += 1
                elif answer.status != 405:
                    answered[f"{method} {path}"] = answer.status
    return {"refused": refused, "answered": answered, "metrics": metrics}


def end_with_one_call(address):
    """The call of :data:`NODE`, without it."""
    import grpc

    same = lambda message: message  # noqa: E731
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.stream_stream("/ray.rpc.syncer.RaySyncer/StartSync", same, same)
        try:
            return str(next(call(iter([b""]), timeout=HOSTS_WORD), "nothing"))
        except grpc.RpcError as error:
            return str(error.code().name)


if __name__ == "__main__":
    assert not [name for name in os.environ if name.startswith("RAY_")]
    if sys.argv[1] == "--end":
        print(end_with_one_call(sys.argv[2]))
    else:
        print(json.dumps({port: knock(sys.argv[1], int(port)) for port in sys.argv[2:]}))
