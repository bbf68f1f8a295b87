"""Estimates that a router learns from the requests it has served: exponentially weighted means.

The decode worker's report of a KV transfer (``Measured`` in wire.proto) gives the bandwidth of each
link and the KV bytes of a token; its timeline gives the latency of the way to a prefill worker. The
router's own clock gives the ratio of observed to predicted TTFT and the mean output length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from protocol.wire import wire_pb2 as pb
from router.placement.cost import PATH_S
from router.placement.snapshot import LinkEstimates

EWMA_WEIGHT = 0.1
INITIAL_BANDWIDTH = 500e6
"""Bytes/s of a link before any measurement."""
INITIAL_OUTPUT_TOKENS = 128.0
CORRECTION_RANGE = (0.5, 2.0)
RATIO_RANGE = (0.25, 4.0)
"""One observed/predicted ratio is clamped to this range: a single stall is not a trend."""
MAX_KV_BYTES = 1 << 26
"""Of a token: ten times those of a model of 175 billion parameters without grouped queries."""
MAX_BANDWIDTH = 1e13
"""Bytes/s of a link, above any memory's."""
MIN_TAIL_S, MAX_TAIL_S = 1e-4, 60.0
"""Shorter transfers measure clocks; longer ones are garbage."""


class RoutingEstimates:
    """The estimates of one router. ``retain`` drops the entries of workers that are gone."""

    def __init__(self) -> None:
        self.output = INITIAL_OUTPUT_TOKENS
        self._bandwidth: dict[tuple[str, str], float] = {}
        self._path_s: dict[tuple[str, str], float] = {}
        self._typical = (
            INITIAL_BANDWIDTH  # mean over all links, used for a link without measurement
        )
        self._kv_bytes: float | None = None
        self._corrections: dict[str, float] = {}

    def network(self, active: Mapping[tuple[str, str], int]) -> LinkEstimates:
        return LinkEstimates(self._bandwidth, self._path_s, active, self._typical)

    def kv_bytes(self, nominal: int) -> float:
        """Return the KV bytes of a token on the wire; ``nominal``, as stored, before any
        transfer."""
        return float(nominal) if self._kv_bytes is None else self._kv_bytes

    def correction(self, instance: str) -> float:
        return self._corrections.get(instance, 1.0)

    def record_transfer(self, decode: str, measured: pb.Measured) -> None:
        """Learn from a finished KV transfer. Values from the network are only checked for sense."""
        ratio = measured.kv_bytes / measured.kv_tokens if measured.kv_tokens else 0.0
        if 0 < ratio <= MAX_KV_BYTES:
            self._kv_bytes = _mean(self._kv_bytes, ratio)
        if measured.tail_bytes and MIN_TAIL_S < measured.tail_seconds < MAX_TAIL_S:
            link = (measured.prefill_instance, decode)
            rate = min(measured.tail_bytes / measured.tail_seconds, MAX_BANDWIDTH)
            self._bandwidth[link] = _mean(self._bandwidth.get(link), rate)
            self._typical = _mean(self._typical, rate)

    def record_path(self, prefill: str, decode: str, seconds: float) -> None:
        """Learn the seconds from a request's arrival at D until it was queued at P."""
        if 0 <= seconds < 1:
            link = (prefill, decode)
            self._path_s[link] = _mean(self._path_s.get(link, PATH_S), seconds)

    def record_first_token(self, instance: str, predicted_s: float, observed_s: float) -> None:
        """Learn the worker's correction; ``predicted_s`` does not include the current one."""
        if predicted_s <= 0:
            return
        low, high = RATIO_RANGE
        ratio = min(high, max(low, observed_s / predicted_s))
        low, high = CORRECTION_RANGE
        corrected = _mean(self.correction(instance), ratio)
        self._corrections[instance] = min(high, max(low, corrected))

    def record_output(self, output_tokens: int) -> None:
        self.output = _mean(self.output, output_tokens)

    def retain(self, instances: Collection[str]) -> None:
        """Drop the estimates of all workers but these."""
        for links in (self._bandwidth, self._path_s):
            for link in [k for k in links if not (k[0] in instances and k[1] in instances)]:
                del links[link]
        for instance in [i for i in self._corrections if i not in instances]:
            del self._corrections[instance]


def _mean(before: float | None, new: float) -> float:
    return float(new) if before is None else before + EWMA_WEIGHT * (new - before)
