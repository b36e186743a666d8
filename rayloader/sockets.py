"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct

_CREDENTIALS = struct.Struct("3i")


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them (SO_PEERCRED)."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid
