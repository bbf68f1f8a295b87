"""What a router learns from the requests that it has served: exponentially weighted means.

From the decode worker's account of a hand-over (``Measured`` in wire.proto): the bandwidth of each
link and the bytes that a token's KV takes. From its timeline: how long the way to a prefill worker
is. From our own clock: how the time to a first token compares with what was predicted, and how
long outputs are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from protocol.wire import wire_pb2 as pb
from router.placement.cost import PATH_S
from router.placement.snapshot import Network

WEIGHT = 0.1
"""Of a new observation."""
BANDWIDTH = 500e6
"""Bytes/s of a link, as long as none has been measured."""
CORRECTION = (0.5, 2.0)
SURPRISE = (0.25, 4.0)
"""One observed/predicted counts as at most this: a stall is no trend."""
OUTPUT = 128.0
"""Tokens of an output, as long as none has ended."""
LEAST_TAIL_S, MOST_TAIL_S = 1e-4, 60.0
"""Shorter ones measure clocks; longer ones are garbage."""


class Learned:
    """Entries of workers that are gone are dropped by ``keep``."""

    def __init__(self) -> None:
        self.output = OUTPUT
        self._bandwidth: dict[tuple[str, str], float] = {}
        self._path_s: dict[tuple[str, str], float] = {}
        self._typical = BANDWIDTH  # of all links: what a new one is taken to have
        self._kv_bytes: float | None = None
        self._corrections: dict[str, float] = {}

    def network(self, active: Mapping[tuple[str, str], int]) -> Network:
        return Network(self._bandwidth, self._path_s, active, self._typical)

    def kv_bytes(self, nominal: int) -> float:
        """Bytes on the wire for one token's KV; ``nominal``: as it lies in a pool."""
        return float(nominal) if self._kv_bytes is None else self._kv_bytes

    def correction(self, instance: str) -> float:
        return self._corrections.get(instance, 1.0)

    def handed_over(self, decode: str, measured: pb.Measured) -> None:
        """A hand-over has ended. What came over the network is checked for sense only."""
        if measured.kv_tokens and measured.kv_bytes:
            ratio = measured.kv_bytes / measured.kv_tokens
            self._kv_bytes = _mean(self._kv_bytes, ratio)
        if measured.tail_bytes and LEAST_TAIL_S < measured.tail_seconds < MOST_TAIL_S:
            link = (measured.prefill_instance, decode)
            rate = measured.tail_bytes / measured.tail_seconds
            self._bandwidth[link] = _mean(self._bandwidth.get(link), rate)
            self._typical = _mean(self._typical, rate)

    def path(self, prefill: str, decode: str, seconds: float) -> None:
        """Seconds from a request's arrival at D until P had it."""
        if 0 <= seconds < 1:
            link = (prefill, decode)
            self._path_s[link] = _mean(self._path_s.get(link, PATH_S), seconds)

    def first_token(self, instance: str, predicted_s: float, observed_s: float) -> None:
        """``predicted_s``: without the correction."""
        if predicted_s <= 0:
            return
        low, high = SURPRISE
        ratio = min(high, max(low, observed_s / predicted_s))
        low, high = CORRECTION
        corrected = _mean(self.correction(instance), ratio)
        self._corrections[instance] = min(high, max(low, corrected))

    def ended(self, output_tokens: int) -> None:
        self.output = _mean(self.output, output_tokens)

    def corrections(self) -> Mapping[str, float]:
        return self._corrections

    def keep(self, instances: Collection[str]) -> None:
        """Forget what was learnt of others than these."""
        for links in (self._bandwidth, self._path_s):
            for link in [k for k in links if not (k[0] in instances and k[1] in instances)]:
                del links[link]
        for instance in [i for i in self._corrections if i not in instances]:
            del self._corrections[instance]


def _mean(before: float | None, new: float) -> float:
    return float(new) if before is None else before + WEIGHT * (new - before)
