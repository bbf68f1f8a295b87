"""Length-prefixed batches of typed messages over the local socket of front and engine.

Each batch is a 4-byte little-endian length and a msgpack array. Both ends decode into the types of
``engine.ipc.messages`` only. The engine uses ``EngineChannel``; the front has an event loop and
uses ``BatchDecoder`` and ``encode_batch``.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
MAX_BATCH_BYTES = 256 << 20

T = TypeVar("T")


class ChannelClosed(Exception):
    """The other end has closed the socket."""


class BatchDecoder(Generic[T]):
    """Decodes a byte stream, however it is fragmented, into messages of one type."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Return the messages that ``data`` completes."""
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


def encode_batch(messages: Sequence[Any]) -> bytes:
    """Return one batch as bytes."""
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


class Wakeup:
    """A descriptor that is readable from ``wake``, which any thread may call, until ``clear``."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class EngineChannel(Generic[T]):
    """The engine's end of the socket. It never blocks the step loop: ``send`` keeps what the socket
    does not accept for later. Any thread may call ``send`` and ``wake``, and one ``receive``."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._wakeup = Wakeup()
        self._poll.register(self._wakeup.fd, select.POLLIN)
        self._decoder: BatchDecoder[T] = BatchDecoder(kind)
        self._out = bytearray()
        self._sending = threading.Lock()

    def wake(self) -> None:
        """End the present or the next wait of ``receive``."""
        self._wakeup.wake()

    def receive(self, wait_s: float) -> list[T]:
        """Return the messages that have arrived, waiting up to ``wait_s`` for the first one or
        for ``wake``. Raise ChannelClosed when the front is gone."""
        waiting = select.POLLIN | (select.POLLOUT if self._out else 0)
        self._poll.modify(self._socket, waiting)
        ready = self._poll.poll(wait_s * 1000)
        if any(fd == self._wakeup.fd for fd, _ in ready):
            self._wakeup.clear()
        self._flush()
        received: list[T] = []
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                return received
            except ConnectionError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            received += self._decoder.feed(data)
            if len(data) < 1 << 18:
                return received

    def send(self, messages: Sequence[Any]) -> None:
        """Queue a batch, and send what the socket accepts without waiting. Raise ChannelClosed."""
        batch = encode_batch(messages) if messages else b""
        self._flush(batch)
        if batch and self._out:
            self._wakeup.wake()  # so that a loop that waits already waits for the socket, too

    def _flush(self, batch: bytes = b"") -> None:
        with self._sending:
            self._out += batch
            while self._out:
                try:
                    sent = self._socket.send(self._out)
                except BlockingIOError:
                    return
                except ConnectionError as error:
                    raise ChannelClosed from error
                del self._out[:sent]
