"""One gRPC channel for each endpoint, while it is in use."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

IDLE_S = 600.0
"""Longer than any call lasts: a channel that nobody has asked for since then serves no one. Workers
that restart come back on other ports, and what led to the old ones would pile up."""

C = TypeVar("C")


class Channels(Generic[C]):
    """Opens channels when first asked for, and closes those that have been idle."""

    def __init__(
        self,
        open_channel: Callable[[str], C],
        close_channel: Callable[[C], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._close, self._clock = open_channel, close_channel, clock
        # By endpoint and version; the longest unused first.
        self._channels: OrderedDict[tuple[str, int], tuple[C, float]] = OrderedDict()

    def get(self, endpoint: str, version: int = 0) -> C:
        """The channel to ``endpoint`` (host:port). With another ``version`` it is another one; what
        runs on the old one goes on."""
        now, key = self._clock(), (endpoint, version)
        channel, _ = self._channels.pop(key, (None, 0.0))
        if channel is None:
            channel = self._open(endpoint)
        self._channels[key] = (channel, now)
        while now - next(iter(self._channels.values()))[1] > IDLE_S:
            _, (idle, _) = self._channels.popitem(last=False)
            self._close(idle)
        return channel

    def drain(self) -> list[C]:
        """All of them, to be closed by the caller; none is kept."""
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        return channels
