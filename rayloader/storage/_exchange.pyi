# Described by rayloader.storage.http_client.exchange, which does the same in Python.

def exchange(
    fd: int, request: bytes, head: bytearray, target: memoryview | None, /
) -> tuple[int, int]: ...
