"""The store through which the two ends of one pair find each other.

A collective library writes the address of its socket (gloo) or a communicator's id (NCCL) to a
store, and waits for the value of the other end. Both values travel with the messages of the fronts,
whose connection is authenticated. ``torch.distributed.TCPStore`` is no alternative: it listens on a
port without authentication, and its client waits without any deadline for a server that is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from engine.ipc.pair_messages import MAX_PAIR_VALUE_BYTES, PairValue
from protocol.errors import CarrierFailed

MAX_KEYS = 64


class PairStore(Store):
    """The values of one pair. ``PairGroups.prepare`` creates it; the library reads and writes it in
    the collective thread, and ``deliver`` and ``cancel`` may be called on any thread."""

    def __init__(self, pair: str, publish: Callable[[PairValue], None], timeout_s: float) -> None:
        super().__init__()
        self._pair = pair
        self._publish = publish
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._cancelled = False

    def deliver(self, key: str, value: bytes) -> None:
        """Store a value of the other end. What is too large or too much is ignored."""
        if len(value) <= MAX_PAIR_VALUE_BYTES and len(self._values) < MAX_KEYS:
            self._put(key, value)

    def cancel(self) -> None:
        """Let every wait fail, now and later."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    # ---- called by the library ---------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._put(key, data)
        self._publish(PairValue(self._pair, key, data))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + self._timeout_s  # ``timeout`` is for one attempt to connect
        with self._changed:
            while not all(key in self._values for key in keys):
                left_s = deadline - time.monotonic()
                if self._cancelled or left_s <= 0:
                    raise CarrierFailed(
                        f"the other end of pair {self._pair} did not answer within"
                        f" {self._timeout_s:g} s"
                    )
                self._changed.wait(left_s)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def has_extended_api(self) -> bool:
        return False

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
