"""Estimates that a router learns from the requests it has served: exponentially weighted means, in
which the first values weigh more.

The decode worker's report of a KV transfer (``Measured`` in wire.proto) gives the bandwidth of each
link and the KV bytes of a token. Its timeline, beside the router's own clock, divides the time to
first token into queue and prefill, whose ratio to their prediction is learned, and the way between
router and workers. Ended requests give the lengths of outputs (``output_lengths.py``).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from typing import TypeVar

from protocol.wire import wire_pb2 as pb
from router.placement.cost import LOCAL_PATH_S, PATH_S
from router.placement.output_lengths import OutputLengths
from router.placement.snapshot import LinkEstimates

K = TypeVar("K", str, tuple[str, str])

EWMA_WEIGHT = 0.1
"""Of a value after the first ones, which weigh as much as each other and what was taken for granted
before: one of several routers sees few requests on each link. The first bandwidth counts alone."""
INITIAL_BANDWIDTH = 500e6
"""Bytes/s of a link before any measurement."""
CORRECTION_RANGE = (0.5, 2.0)
"""Of either factor in ``TtftCorrections``; both together reach the squares."""
MOST_SURPRISE = 0.2
"""Largest error in the logarithm of a factor that one request corrects: a single stall is not a
trend."""
STEADY_S = 0.2
"""A request that is predicted to compute for less weighs less, in proportion: its time is mostly
that of processes, and what is predicted before a worker knows its own steps is a guess."""
MIN_RATIO = 1e-3
"""A smaller one of observed over predicted counts as this."""
MAX_NEIGHBOURS = 8
"""More busy engines beside a worker count as so many."""
MAX_KV_BYTES = 1 << 26
"""Of a token: ten times those of a model of 175 billion parameters without grouped queries."""
MAX_BANDWIDTH = 1e13
"""Bytes/s of a link, above any memory's."""
MAX_SESSIONS = 16384
"""Sessions remembered, about 200 bytes each; the one that sent nothing for longest is dropped."""
MIN_PATH_S = 1e-5
"""Shorter ways count as so long."""
MIN_TAIL_S, MAX_TAIL_S = 1e-4, 60.0
"""Shorter transfers measure clocks; longer ones are garbage."""


class SessionWorkers:
    """The workers that served each session last. A hint: a session that is forgotten costs time."""

    def __init__(self) -> None:
        self._workers: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def find(self, session: bytes) -> tuple[str, ...]:
        """Return the workers of the session's last request, none where they are not known."""
        return self._workers.get(session, ())

    def record(self, session: bytes, workers: tuple[str, ...]) -> None:
        """Remember where a request of the session has gone. An empty session is none."""
        if session:
            self._workers[session] = workers
            self._workers.move_to_end(session)
            if len(self._workers) > MAX_SESSIONS:
                self._workers.popitem(last=False)


class TtftCorrections:
    """Observed over predicted time in the queue and of the prefill: a factor of the worker, times
    one for the engines beside it.

    Engines on one host may share its cores and its memory's bandwidth. What a worker reports holds
    for its last seconds, so that it computes a prompt faster while fewer engines are busy than
    were then, and slower beside more. The second factor depends on how many are busy when a request
    is placed; all hosts share it, and on GPUs it stays near 1. Both follow the median of the
    logarithm rather than the mean, which a few stalls would move (MOST_SURPRISE). ``neighbours``:
    busy engines on the worker's host besides its own.
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()  # requests of each worker
        self._of_worker: dict[str, float] = {}  # logarithms
        self._beside = {0: 0.0}  # logarithms by number of neighbours

    def factor(self, instance: str, neighbours: int) -> float:
        of_worker = self._of_worker.get(instance, 0.0)
        return math.exp(of_worker + self._of_neighbours(min(neighbours, MAX_NEIGHBOURS)))

    def record(self, instance: str, neighbours: int, predicted_s: float, observed_s: float) -> None:
        """Learn from one observed time; ``predicted_s``: without any correction."""
        neighbours = min(neighbours, MAX_NEIGHBOURS)
        of_worker, beside = self._of_worker.get(instance, 0.0), self._of_neighbours(neighbours)
        error = math.log(max(MIN_RATIO, observed_s / predicted_s)) - of_worker - beside
        error = min(MOST_SURPRISE, max(-MOST_SURPRISE, error))
        weight = min(_next_weight(self._seen, instance), predicted_s / STEADY_S)
        self._of_worker[instance] = _clamped(of_worker + weight * error)
        if neighbours:
            weight = min(EWMA_WEIGHT, predicted_s / STEADY_S)
            self._beside[neighbours] = _clamped(beside + weight * error)

    def retain(self, instances: Collection[str]) -> None:
        for instance in [i for i in self._of_worker if i not in instances]:
            del self._of_worker[instance], self._seen[instance]

    def _of_neighbours(self, count: int) -> float:
        """Return the logarithm for so many neighbours, or for the nearest number that was seen."""
        if count in self._beside:
            return self._beside[count]
        return self._beside[min(self._beside, key=lambda seen: abs(seen - count))]


def _clamped(logarithm: float) -> float:
    low, high = CORRECTION_RANGE
    return min(math.log(high), max(math.log(low), logarithm))


class RoutingEstimates:
    """The estimates of one router. ``retain`` drops the entries of workers that are gone."""

    def __init__(self) -> None:
        self.outputs = OutputLengths()
        self.sessions = SessionWorkers()
        self._bandwidth: dict[tuple[str, str], float] = {}
        self._path_s: dict[tuple[str, str], float] = {}
        self._paths_seen: Counter[tuple[str, str]] = Counter()  # requests of each
        self._typical = (
            INITIAL_BANDWIDTH  # mean over all links, used for a link without measurement
        )
        self._kv_bytes: float | None = None
        self._corrections = TtftCorrections()

    def network(self, active: Mapping[tuple[str, str], int]) -> LinkEstimates:
        return LinkEstimates(self._bandwidth, self._path_s, active, self._typical)

    def kv_bytes(self, nominal: int) -> float:
        """Return the KV bytes of a token on the wire; ``nominal``, as stored, before any
        transfer."""
        return float(nominal) if self._kv_bytes is None else self._kv_bytes

    def correction(self, instance: str, neighbours: int = 0) -> float:
        return self._corrections.factor(instance, neighbours)

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
        """Learn the seconds of a first token that were neither in a queue nor computed: until the
        request was queued at P, and from there to this router. P may be D itself. The estimate is
        a geometric mean: a process that stood still for a moment makes a few of these times ten
        times as long as the others."""
        if 0 <= seconds < 1:
            link = (prefill, decode)
            before = self._path_s.get(link, LOCAL_PATH_S if prefill == decode else PATH_S)
            error = math.log(max(MIN_PATH_S, seconds) / before)
            weight = _next_weight(self._paths_seen, link)
            self._path_s[link] = before * math.exp(weight * max(-1.0, min(1.0, error)))

    def record_first_token(
        self, instance: str, predicted_s: float, observed_s: float, neighbours: int = 0
    ) -> None:
        """Learn the correction from the seconds in the queue and of the prefill; ``predicted_s``
        does not include any."""
        if predicted_s > 0:
            self._corrections.record(instance, neighbours, predicted_s, observed_s)

    def retain(self, instances: Collection[str]) -> None:
        """Drop the estimates of all workers but these."""
        for links in (self._bandwidth, self._path_s, self._paths_seen):
            for link in [k for k in links if not (k[0] in instances and k[1] in instances)]:
                del links[link]
        self._corrections.retain(instances)


def _next_weight(seen: Counter[K], key: K) -> float:
    """Count one more value of ``key``, and return its weight."""
    seen[key] += 1
    return max(EWMA_WEIGHT, 1.0 / (seen[key] + 1))


def _mean(before: float | None, new: float) -> float:
    return float(new) if before is None else before + EWMA_WEIGHT * (new - before)
