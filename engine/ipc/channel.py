"""Length-prefixed batches of typed messages over a local socket. Torch-free.

Each batch is a 4-byte little-endian length and a msgpack array. Both ends decode into the types of
``engine.ipc.messages`` only.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
MAX_BATCH_BYTES = 256 << 20

T = TypeVar("T")


class Closed(Exception):
    """The other end is gone."""


class Framer(Generic[T]):
    """Bytes to batches, however they are cut on the way."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Messages that ``data`` completes."""
        self._buffer += data
        out: list[T] = []
        while len(self._buffer) >= 4:
            (size,) = _LENGTH.unpack_from(self._buffer)
            assert size <= MAX_BATCH_BYTES
            if len(self._buffer) < 4 + size:
                break
            with memoryview(self._buffer) as view:
                out += self._decode(view[4 : 4 + size])
            del self._buffer[: 4 + size]
        return out


_encoder = msgspec.msgpack.Encoder()


def pack(messages: Sequence[Any]) -> bytes:
    """One batch as bytes."""
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


class EngineChannel(Generic[T]):
    """The engine's end: never blocks the step loop.

    ``receive`` takes what has arrived; ``send`` keeps what the socket does not take for later.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._framer: Framer[T] = Framer(kind)
        self._out = bytearray()

    def receive(self, wait_s: float) -> list[T]:
        """Messages that have come; waits up to ``wait_s`` when there are none.

        Raises Closed when the front is gone."""
        waiting = select.POLLIN | (select.POLLOUT if self._out else 0)
        self._poll.modify(self._socket, waiting)
        self._poll.poll(wait_s * 1000)
        self._flush()
        received: list[T] = []
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                return received
            except ConnectionError as error:
                raise Closed from error
            if not data:
                raise Closed
            received += self._framer.feed(data)
            if len(data) < 1 << 18:
                return received

    def send(self, messages: Sequence[Any]) -> None:
        """Queue a batch and send what goes without waiting. Raises Closed."""
        if messages:
            self._out += pack(messages)
        self._flush()

    def _flush(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise Closed from error
            del self._out[:sent]
