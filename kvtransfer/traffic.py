"""Counts the KV that a worker receives, and measures how fast it comes while requests wait. The
metrics page and the utilisation of the worker read it. Event loop only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.ipc.counters import BucketCounts
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece
from kvtransfer.frames import HEADER_BYTES

MIN_MEASURED_BYTES = 64 << 10
"""A wait that brings fewer bytes measures latency instead of bandwidth, and is left out."""

MEASURED_WAITS = 16
"""Number of recent waits that ``best_bytes_per_s`` covers, so that a link that has become slower is
noticed after so many."""

TRANSFER_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class KVWaitMeter:
    """Waits for KV alone, over all transfers to one worker.

    Once a prompt is computed, the rest of its KV (the tail) comes as fast as the link carries it.
    The best of the recent tails is the bandwidth of a link for which no setting declares one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=MEASURED_WAITS)
        self._active = 0
        self._waited_s = 0.0
        self._updated = clock()

    @contextmanager
    def waiting(
        self,
        received_bytes: Callable[[], int],
        on_rate: Callable[[float], None] = lambda rate: None,
    ) -> Iterator[None]:
        """Measure the body, in which a receiver waits for KV alone; ``received_bytes`` returns the
        bytes of its transfer so far. A body that raises adds to the time, and to no rate.
        ``on_rate`` is called with the bytes per second of a wait that was long enough."""
        self._update(1)
        began, before = self._clock(), received_bytes()
        try:
            yield
            count, seconds = received_bytes() - before, self._clock() - began
            if count >= MIN_MEASURED_BYTES and seconds > 0:
                self._rates.append(count / seconds)
                on_rate(count / seconds)
        finally:
            self._update(-1)

    @property
    def waited_s(self) -> float:
        """Seconds that receivers have waited for KV alone, summed over the receivers."""
        self._update(0)
        return self._waited_s

    @property
    def best_bytes_per_s(self) -> float | None:
        """Best rate of the recent waits; None until one has been long enough."""
        return max(self._rates, default=None)

    def _update(self, started: int) -> None:
        now = self._clock()
        self._waited_s += self._active * (now - self._updated)
        self._updated = now
        self._active += started


@dataclass
class CarrierTraffic:
    """KV received by one carrier with one codec. Bytes include frame headers; ``raw_bytes`` is what
    the same frames would have had with the codec raw; ``seconds`` counts whole transfers."""

    frames: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    failures: int = 0
    seconds: BucketCounts = field(default_factory=lambda: BucketCounts.over(TRANSFER_SECONDS))


@dataclass
class TrafficCounter:
    """All KV that one worker has received, by carrier and codec."""

    by_carrier: dict[tuple[str, Codec], CarrierTraffic] = field(default_factory=dict)
    kv_wait: KVWaitMeter = field(default_factory=KVWaitMeter)

    @property
    def bytes(self) -> int:
        """Bytes received so far, headers included."""
        return sum(traffic.bytes for traffic in self.by_carrier.values())

    @property
    def frames(self) -> int:
        """Frames received so far."""
        return sum(traffic.frames for traffic in self.by_carrier.values())

    def of(self, carrier: str, codec: Codec) -> CarrierTraffic:
        """Return the counts of a carrier and a codec."""
        return self.by_carrier.setdefault((carrier, codec), CarrierTraffic())

    def count_frame(
        self, carrier: str, kv_format: KVFormat, codec: Codec, piece: KVPiece, nbytes: int
    ) -> None:
        """Count one frame with ``nbytes`` of payload."""
        traffic = self.of(carrier, codec)
        traffic.frames += 1
        traffic.bytes += HEADER_BYTES + nbytes
        traffic.raw_bytes += HEADER_BYTES + kv_format.piece_bytes(piece, Codec.RAW)

    def count_transfer(self, carrier: str, codec: Codec, seconds: float) -> None:
        """Count a transfer whose frames have all come."""
        self.of(carrier, codec).seconds.add(seconds, TRANSFER_SECONDS)

    def count_failure(self, carrier: str, codec: Codec) -> None:
        """Count a transfer that broke, or brought a frame that failed a check."""
        self.of(carrier, codec).failures += 1
