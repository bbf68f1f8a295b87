"""The Unix socket of the carrier ``local``: how a worker gives another one on its host a descriptor
of its arena, for reading alone.

    D -> P   "BLK1", u32 number of the engine session, token
    P -> D   "BLK1", u64 bytes of a slot, u32 slots; the descriptor as ancillary data
    then the connection is the sign of life of the arena: it is closed when the session ends

The socket has an abstract name, which is random: it belongs to the network namespace and leaves
nothing behind. Only processes of the same user are spoken to, and the receiver proves the cluster's
token. Every packet is one message (SOCK_SEQPACKET).
"""

from __future__ import annotations

import hmac
import os
import re
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from engine.ipc.shared_memory import MAX_PEER_SLOT_BYTES, MAX_PEER_SLOTS
from protocol.errors import CarrierFailed

_MAGIC = b"BLK1"
_HELLO = struct.Struct("<4sI")
_ARENA = struct.Struct("<4sQI")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_HELLO = 8192
_ADDRESS = re.compile(r"(baton-[0-9a-f]{32})/([0-9]{1,9})")


def host_identity() -> str:
    """Return a text that two workers share if one can reach the other's abstract sockets: the same
    boot of the same kernel, the same network namespace, and the same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}/{os.geteuid()}"


def pack_address(name: str, serial: int) -> str:
    """Return the address of a session's arena: the socket's name and the session's number."""
    return f"{name}/{serial}"


def parse_address(address: str) -> tuple[str, int]:
    """Return name and number. Raises CarrierFailed for anything else than an address."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise CarrierFailed(f"local: {address[:80]!r} is no address of an arena")
    return match[1], int(match[2])


def new_socket() -> socket.socket:
    """Return a socket that never blocks."""
    return socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )


def listen(name: str) -> socket.socket:
    """Return a listening socket. Raises OSError."""
    sock = new_socket()
    sock.bind(f"\0{name}")
    sock.listen(64)
    return sock


def same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this process's user."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


def send_hello(sock: socket.socket, serial: int, token: bytes) -> None:
    """Ask for the arena of a session. Raises OSError."""
    sock.send(_HELLO.pack(_MAGIC, serial) + token)


def read_hello(sock: socket.socket, token: bytes) -> int:
    """Return the number of the session that is asked for. Raises CarrierFailed or OSError."""
    data = sock.recv(_MAX_HELLO)
    if len(data) < _HELLO.size:
        raise CarrierFailed("local: it is no receiver of KV")
    magic, serial = _HELLO.unpack_from(data)
    if magic != _MAGIC or not hmac.compare_digest(data[_HELLO.size :], token):
        raise CarrierFailed("local: it has a wrong cluster token")
    return int(serial)


class ArenaDescriptor(NamedTuple):
    """Another worker's arena as it came over the socket; the owner closes ``fd``."""

    fd: int
    slot_bytes: int
    slots: int


def send_arena(sock: socket.socket, arena: ArenaDescriptor) -> None:
    """Give an arena away for reading. Raises OSError."""
    socket.send_fds(sock, [_ARENA.pack(_MAGIC, arena.slot_bytes, arena.slots)], [arena.fd])


def read_arena(sock: socket.socket) -> ArenaDescriptor:
    """Return the arena that comes. Raises CarrierFailed, also when the other end has closed the
    socket, or OSError."""
    data, fds, _, _ = socket.recv_fds(sock, _ARENA.size, 4)
    try:
        if not data:
            raise CarrierFailed("local: the other worker has closed the socket")
        if len(data) != _ARENA.size or len(fds) != 1:
            raise CarrierFailed("local: the other worker has sent no arena")
        magic, slot_bytes, slots = _ARENA.unpack(data)
        if magic != _MAGIC:
            raise CarrierFailed(f"local: expected {_MAGIC!r}, {magic!r} came")
        if not (0 < slot_bytes <= MAX_PEER_SLOT_BYTES and 0 < slots <= MAX_PEER_SLOTS):
            raise CarrierFailed(f"local: an arena of {slots} slots of {slot_bytes} bytes came")
    except CarrierFailed:
        for fd in fds:
            os.close(fd)
        raise
    return ArenaDescriptor(fds[0], slot_bytes, slots)
