"""Finds and reserves TCP ports of this machine; called by `baton up`, `baton doctor` and tests.

A free port can be taken a moment later. The process that binds it then reports the error.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil

from protocol.errors import StartupError

_TRIES = 100


def is_port_free(host: str, port: int) -> bool:
    """Return whether a listener could bind ``host:port`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        # Servers set this option, too: connections in TIME_WAIT do not block a bind, listeners do.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def port_owner(port: int) -> str:
    """Describe the process that listens on ``port``: pid and command where these are visible."""
    try:
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr or None
            if connection.status == psutil.CONN_LISTEN and address and address.port == port:
                return _describe_process(connection.pid)
    except (psutil.Error, OSError):
        pass
    return "a process that this user cannot see"


def _describe_process(pid: int | None) -> str:
    try:
        process = psutil.Process(pid) if pid is not None else None
        command = _command(process) if process is not None else ""
    except psutil.Error:
        command = ""
    if not command:
        return f"pid {pid}" if pid is not None else "a process of another user"
    return f"pid {pid} ({command[:60]})"


def _command(process: psutil.Process) -> str:
    """Return the command without its options, which may hold secrets."""
    shown = []
    for word in process.cmdline():
        if word.startswith("--") or any(mark in word for mark in ("=", "@", "://")):
            break
        shown.append(word)
    return " ".join([Path(shown[0]).name, *shown[1:]]) if shown else process.name()


def first_free_port(host: str, wanted: int) -> int:
    """Return ``wanted`` when it is free, else the next free port above it.

    Raises StartupError for an invalid number, or when 100 ports in a row are taken."""
    if not 1 <= wanted <= 65535:
        raise StartupError(f"port must be in 1..65535, not {wanted}")
    for port in range(wanted, min(wanted + _TRIES, 65536)):
        if is_port_free(host, port):
            return port
    raise StartupError(f"no free port on {host} in {wanted}..{wanted + _TRIES - 1}: give --port")


def hold_port(host: str, port: int) -> list[socket.socket]:
    """Bind ``host:port`` with SO_REUSEPORT and without listening, and return the sockets.

    Other programs then find the port taken (see ``is_port_free``), while routers, which set
    SO_REUSEPORT too, can listen on it. An address that cannot be bound is skipped: another
    process listens there. The caller closes the sockets."""
    held = []
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        held.append(each := socket.socket(family, kind, protocol))
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with contextlib.suppress(OSError):
            each.bind(address)
    return held


def free_ports(host: str, count: int) -> list[int]:
    """Return ``count`` different ports that are free now."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            s = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            s.bind((host, 0))
            ports.append(int(s.getsockname()[1]))
        return ports
