"""Unix sockets: who is at the other end, and how to send without waiting."""

from __future__ import annotations

import socket
import struct

AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""Flags of a send that neither waits nor raises a signal; a number, since enumerations are slower
than the call."""
_CREDENTIALS = struct.Struct("3i")


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them (SO_PEERCRED)."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid
