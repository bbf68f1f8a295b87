"""memcpy: the sender's process copies one buffer to another; the receiver's does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.kv_link.media.memory import make_buffer


class MemcpyEnd:
    def __init__(self, sending: bool) -> None:
        self._sending = sending

    def open(self, options: dict[str, Any]) -> None:
        if self._sending:
            self._source = np.frombuffer(make_buffer(True), dtype=np.uint8)
            self._target = np.frombuffer(make_buffer(False), dtype=np.uint8)

    def connect(self, other: Any) -> None:
        pass

    def run(self, job: dict[str, Any]) -> None:
        if self._sending:
            np.copyto(self._target[: job["bytes"]], self._source[: job["bytes"]])

    def digest(self, job: dict[str, Any]) -> int:
        """Return the number of bytes that differ, 0, at both ends."""
        if not self._sending:
            return 0
        size = job["bytes"]
        return int(np.count_nonzero(self._target[:size] != self._source[:size]))

    def close(self) -> None:
        pass
