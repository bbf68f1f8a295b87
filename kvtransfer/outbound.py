"""The frames of one transfer on their way out over a stream: P's end of the stream carriers.

    PrefillService --put--> OutboundFrames --take--> a thread of the carrier --> the receiver
                                                             +--> release: the slot may be filled

A stream carrier has one ``TransferTable``: a receiver names a transfer by its id, and each of its
connections takes the next frame.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtransfer.carrier import OutboundFrame
from protocol.errors import TransferFailed

MAX_CONNECTIONS = 8
"""Connections that one transfer may use."""


class OutboundFrames:
    """The ``OutboundLink`` of a stream carrier. Any thread may call ``claim``, ``take`` and the
    properties."""

    def __init__(
        self,
        transfer: bytes,
        on_frame: Callable[[OutboundFrames], None],
        on_close: Callable[[OutboundFrames], None],
    ) -> None:
        """``on_frame`` is called after each frame that was put, ``on_close`` once."""
        self.transfer = transfer
        self._on_frame = on_frame
        self._on_close = on_close
        self._changed = threading.Condition()
        self._waiting: deque[OutboundFrame] = deque()
        self._ended = False  # the last frame was put, or the transfer is closed
        self._closed = False
        self._connections: set[int] = set()

    def claim(self, connection: int) -> bool:
        """Return whether the connection with this number may take frames: each number once."""
        with self._changed:
            if self._closed or connection in self._connections or connection >= MAX_CONNECTIONS:
                return False
            self._connections.add(connection)
            return True

    def put(self, frame: OutboundFrame) -> None:
        with self._changed:
            if self._closed:
                frame.release()
                return
            self._waiting.append(frame)
            self._ended = self._ended or frame.last
            self._changed.notify()
            if frame.last:
                self._changed.notify_all()
        self._on_frame(self)

    def take(self, wait_s: float) -> OutboundFrame | None:
        """Return the next frame, waiting up to ``wait_s`` for one; None if there is none. The
        caller releases it."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not self._waiting and not self._ended:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._waiting.popleft() if self._waiting else None

    @property
    def ended(self) -> bool:
        """Whether no frame waits and none will come."""
        with self._changed:
            return self._ended and not self._waiting

    @property
    def waiting(self) -> bool:
        """Whether a frame waits."""
        return bool(self._waiting)

    @property
    def last_put(self) -> bool:
        """Whether no frame will be put any more."""
        return self._ended

    @property
    def closed(self) -> bool:
        return self._closed

    def taken(self, sequences: Sequence[int]) -> None:
        raise TransferFailed("slots were taken of a transfer whose frames travel on a stream")

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = self._ended = True
            unsent, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for frame in unsent:
            frame.release()
        self._on_close(self)


class TransferTable:
    """The open transfers of one stream carrier, by id. Any thread may call every method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: dict[bytes, OutboundFrames] = {}

    def open(
        self,
        transfer: bytes,
        on_frame: Callable[[OutboundFrames], None] = lambda outbound: None,
        on_close: Callable[[OutboundFrames], None] = lambda outbound: None,
    ) -> OutboundFrames:
        """Make a transfer known, until it is closed; ``on_close`` is called then."""

        def forget(closed: OutboundFrames) -> None:
            with self._lock:
                if self._transfers.get(transfer) is closed:
                    del self._transfers[transfer]
            on_close(closed)

        outbound = OutboundFrames(transfer, on_frame, forget)
        with self._lock:
            self._transfers[transfer] = outbound
        return outbound

    def claim(self, transfer: bytes, connection: int = 0) -> OutboundFrames | None:
        """Return the transfer for a connection to it; None if it is unknown, or the connection's
        number was used before."""
        with self._lock:
            outbound = self._transfers.get(transfer)
        return outbound if outbound is not None and outbound.claim(connection) else None
