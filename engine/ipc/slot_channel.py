"""The socket of the slot commands: the front's end, any thread's, and the copy thread's end.

Its stream is that of ``engine.ipc.channel``. Descriptors of other workers' arenas come as ancillary
data, each before the ``MapArena`` that names it.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from engine.ipc import messages as m
from engine.ipc.channel import BatchDecoder, ChannelClosed, Wakeup, encode_batch

MAX_QUEUED_BYTES = 16 << 20
"""Commands that the engine has not read, some 150,000; with more its thread counts as stuck."""

_RECEIVE_BYTES = 1 << 18
_MAX_FDS = 16
"""Descriptors in one call of recvmsg. The kernel ends a call after those of one sendmsg: 1."""


class SlotSender:
    """The front's end. It never blocks: what the socket does not accept is kept, and sent when the
    event loop calls ``flush``, for which ``on_full`` asks. Any thread may call every method.

    Once it is ``broken``, commands were lost, and with them slots: the engine has to be replaced.
    ``on_full`` is called then, too."""

    def __init__(self, sock: socket.socket, on_full: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_full = on_full
        self._queue: deque[tuple[bytes, int]] = deque()  # bytes, and a descriptor or -1
        self._queued = 0
        self._lock = threading.Lock()
        self._closed = False
        self.broken = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, command: m.SlotCommand) -> None:
        """Send a command after the earlier ones. It is dropped when the engine is gone, because
        the front is told of that elsewhere."""
        self._put(encode_batch([command]), -1)

    def send_descriptor(self, fd: int) -> None:
        """Send a duplicate of ``fd``, for the next ``MapArena``."""
        self._put(encode_batch([]), os.dup(fd))

    def _put(self, data: bytes, fd: int) -> None:
        with self._lock:
            waiting = bool(self._queue)
            if self._closed or self.broken:
                self._forget(fd)
                return
            self._queue.append((data, fd))
            self._queued += len(data)
            if self._queued > MAX_QUEUED_BYTES:
                self._break()
            elif waiting or (self._flush() and not self.broken):
                return
        self._on_full()

    def flush(self) -> bool:
        """Send what is queued and the socket accepts. Return whether nothing is left."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._queue:
            data, fd = self._queue[0]
            extra = [] if fd < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _as_array(fd))]
            try:
                sent = self._socket.sendmsg([data], extra)
            except BlockingIOError:
                return False
            except ConnectionError:  # the engine is gone, which the front is told elsewhere
                self._drop_all()
                return True
            except OSError:
                self._break()
                return True
            self._forget(fd)
            self._queued -= sent
            if sent < len(data):
                self._queue[0] = data[sent:], -1
            else:
                self._queue.popleft()
        return True

    def close(self) -> None:
        """Close the socket, which ends the engine's copy thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop_all()
            self._socket.close()

    def _break(self) -> None:
        self.broken = True
        self._drop_all()

    def _drop_all(self) -> None:
        for _, fd in self._queue:
            self._forget(fd)
        self._queue.clear()
        self._queued = 0

    @staticmethod
    def _forget(fd: int) -> None:
        if fd >= 0:
            os.close(fd)


def _as_array(fd: int) -> array.array[int]:
    return array.array("i", [fd])


class SlotReceiver:
    """The copy thread's end, with a wake-up that other threads trigger."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._wakeup = Wakeup()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wakeup.fd, select.POLLIN)
        self._decoder: BatchDecoder[m.SlotCommand] = BatchDecoder(m.SlotCommand)
        self._fds: deque[int] = deque()

    def wake(self) -> None:
        """End the present or the next wait of ``receive``. Any thread may call it."""
        self._wakeup.wake()

    def receive(self, wait_s: float) -> list[m.SlotCommand]:
        """Return the commands that have arrived, waiting up to ``wait_s`` for one or for ``wake``.
        Raise ChannelClosed when the front is gone."""
        ready = {fd for fd, _ in self._poll.poll(wait_s * 1000)}
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        if self._socket.fileno() not in ready:
            return []
        received: list[m.SlotCommand] = []
        while (data := self._read()) is not None:
            if not data:
                raise ChannelClosed
            received += self._decoder.feed(data)
        return received

    def _read(self) -> bytes | None:
        """Return the next bytes, none at the end of the stream, or None if there are none yet."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MAX_FDS)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise ChannelClosed from error
        self._fds += fds
        return data

    def take_descriptor(self) -> int:
        """Return the descriptor that came before a ``MapArena``; the caller closes it. Raise
        LookupError if there is none."""
        if not self._fds:
            raise LookupError("MapArena came without a descriptor")
        return self._fds.popleft()

    def close(self) -> None:
        self._socket.close()
        self._wakeup.close()
        while self._fds:
            os.close(self._fds.popleft())
