"""Sockets of another machine, for clients in this process: its connections begin there."""

from __future__ import annotations

import ctypes
import os
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.hosts.host import Host

_CLONE_NEWNET = 0x40000000


class Sockets:
    """Makes sockets in a machine's network. A thread of its own has entered that; a socket stays
    where it was made, whoever uses it."""

    def __init__(self, host: Host) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=_enter, initargs=(host.pid,))

    def __call__(self, address: tuple[Any, ...]) -> socket.socket:
        """``address``: a row of getaddrinfo."""
        return self._thread.submit(_socket, address).result()

    def connector(self, tls: ssl.SSLContext) -> aiohttp.TCPConnector:
        """Every request on a connection of its own."""
        return aiohttp.TCPConnector(limit=0, ssl=tls, socket_factory=self, force_close=True)

    def close(self) -> None:
        self._thread.shutdown()


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    with Path(f"/proc/{pid}/ns/net").open() as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    return made
