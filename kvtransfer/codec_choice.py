"""Which codec a transfer uses, and what it puts on the wire."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from engine.ipc.counters import Tally
from engine.kv_cache.kv_format import Codec, KVFormat, Piece
from kvtransfer.frames import HEADER_BYTES
from protocol.errors import StartupError

# MERGED kvtransfer.tails
# KV that is waited for, and how fast it comes then.
#
# Once a prompt is computed, what is left of its KV comes as fast as the link brings it: its tail.
# The
# best of the last tails is what the link can do, where nobody has said so.

LEAST_BYTES = 64 << 10
"""Tails shorter than this measure latencies."""

LAST = 16
"""Tails whose best counts: a link that has become slower is known as such after so many."""


class Tails:
    """Of all transfers to one worker. Event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=LAST)
        self._active = 0
        self._seconds = 0.0
        self._marked = clock()

    @contextmanager
    def waiting(self, came: Callable[[], int]) -> Iterator[None]:
        """A receiver waits for nothing but KV. ``came``: bytes of it so far."""
        self._mark(1)
        began, before = self._clock(), came()
        try:
            yield
            count, seconds = came() - before, self._clock() - began
            if count >= LEAST_BYTES and seconds > 0:
                self._rates.append(count / seconds)
        finally:
            self._mark(-1)

    @property
    def seconds(self) -> float:
        """That receivers have waited so, summed up over them."""
        self._mark(0)
        return self._seconds

    @property
    def best(self) -> float | None:
        """Bytes per second; None as long as nobody has waited for enough."""
        return max(self._rates, default=None)

    def _mark(self, more: int) -> None:
        now = self._clock()
        self._seconds += self._active * (now - self._marked)
        self._marked = now
        self._active += more


Wanted: TypeAlias = Literal["auto", "raw", "fp8"]

TRANSFER_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


def choose(format_: KVFormat, wanted: Wanted) -> Codec:
    """The codec to ask for. ``auto``: the one with the fewest bytes that changes no value. Raises
    StartupError for one that would."""
    codecs = {codec.name.lower(): codec for codec in format_.codecs}
    if wanted == "auto":
        return min(codecs.values(), key=format_.page_layer_bytes)
    if wanted not in codecs:
        raise StartupError(
            f"the codec {wanted} would round KV, which has the precision {format_.precision}:"
            f" use {' or '.join(['auto', *codecs])}, or the precision fp8"
        )
    return codecs[wanted]


@dataclass
class Traffic:
    """What has come in by one codec, headers included, and what it would have been raw.
    ``seconds``: of whole transfers, over TRANSFER_SECONDS."""

    frames: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    failures: int = 0
    seconds: Tally = field(default_factory=lambda: Tally.over(TRANSFER_SECONDS))


@dataclass
class TrafficCounter:
    """By codec. Event loop only."""

    by_codec: dict[Codec, Traffic] = field(default_factory=dict)
    tails: Tails = field(default_factory=Tails)

    @property
    def bytes(self) -> int:
        """That have come in, headers included."""
        return sum(traffic.bytes for traffic in self.by_codec.values())

    def count(self, format_: KVFormat, codec: Codec, piece: Piece, nbytes: int) -> None:
        """One frame with ``nbytes`` of payload."""
        traffic = self._of(codec)
        traffic.frames += 1
        traffic.bytes += HEADER_BYTES + nbytes
        traffic.raw_bytes += HEADER_BYTES + piece.bytes(format_.page_layer_bytes(Codec.RAW))

    def ended(self, codec: Codec, seconds: float) -> None:
        """A transfer has come whole."""
        self._of(codec).seconds.add(seconds, TRANSFER_SECONDS)

    def failed(self, codec: Codec) -> None:
        """A transfer broke, or brought what must not be believed."""
        self._of(codec).failures += 1

    def _of(self, codec: Codec) -> Traffic:
        return self.by_codec.setdefault(codec, Traffic())
