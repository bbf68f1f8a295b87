"""Choosing ports. A port found free can be taken a moment later: who binds it reports that."""

from __future__ import annotations

import contextlib
import socket

from protocol.errors import StartupError

_TRIES = 100


def is_free(host: str, port: int) -> bool:
    """Whether a listener could bind ``host:port`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        # As servers do: connections in TIME_WAIT are not in the way, listeners are.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def first_free(host: str, wanted: int) -> int:
    """``wanted`` when it is free, else the next free port above it."""
    if not 1 <= wanted <= 65535:
        raise StartupError(f"port must be in 1..65535, not {wanted}")
    for port in range(wanted, min(wanted + _TRIES, 65536)):
        if is_free(host, port):
            return port
    raise StartupError(f"no free port on {host} in {wanted}..{wanted + _TRIES - 1}: give --port")


def any_free(host: str, count: int) -> list[int]:
    """``count`` different ports that are free now."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            s = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            s.bind((host, 0))
            ports.append(int(s.getsockname()[1]))
        return ports
