"""All that a routing policy may look at: seconds, tokens, bytes. Frozen values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from router.placement.step_model import StepModel


class Objectives(NamedTuple):
    ttft_s: float
    tpot_s: float


class Query(NamedTuple):
    """A request to place."""

    tokens: int  # n: prompt and tokens already emitted
    output: float  # E[out], at least 2
    kv_bytes: float  # on the wire, of one token


class PrefillState(NamedTuple):
    """A worker as one to prefill on. ``cached``: tokens of this prompt that it holds."""

    instance: str
    model: StepModel
    chunk: int
    queue_s: float
    correction: float
    cached: int


class DecodeState(NamedTuple):
    """A worker as one to decode on. ``own``: as one to prefill on by the way."""

    own: PrefillState
    batch: int  # requests in it
    rows: int  # sequences in a step at most; 0: not known
    kv_used: int  # tokens of live sequences
    kv_free: int  # tokens it can still take
    kv_total: int  # 0: not known
    pace: float = 1.0  # tokens that a sequence gets in the time of a plain step

    @property
    def instance(self) -> str:
        return self.own.instance

    @property
    def cached(self) -> int:
        return self.own.cached


class Network(NamedTuple):
    """What is known of links, by (from, to)."""

    bandwidth: Mapping[tuple[str, str], float]  # bytes/s
    path_s: Mapping[tuple[str, str], float]
    active: Mapping[tuple[str, str], int]  # transfers under way
    default_bandwidth: float

    def share(self, source: str, target: str) -> float:
        """Bytes/s for one more transfer."""
        link = (source, target)
        found = self.bandwidth.get(link, self.default_bandwidth)
        return found / (1 + self.active[link]) if link in self.active else found


class Fetch(NamedTuple):
    """A prefix to be taken from a peer first. ``tokens``: of the prefix, whole blocks."""

    source: str
    tokens: int
    seconds: float


class Snapshot(NamedTuple):
    """All that the choice may look at."""

    prefill: Sequence[PrefillState]
    decode: Sequence[DecodeState]
    network: Network
    resident_output: float  # tokens that a request takes on average
