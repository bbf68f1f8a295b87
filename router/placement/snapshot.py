"""The input of a placement decision: frozen values in seconds, tokens and bytes, without behaviour.

``router.generation.placer`` builds a ``PlacementSnapshot`` and a ``PlacementQuery`` for every
request; ``choose.py`` reads nothing else, so that a decision can be repeated in a test or in the
simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from protocol.performance.speculation_profile import SpeculationProfile
from protocol.performance.step_model import StepModel


class Objectives(NamedTuple):
    """Latency objectives that the cost function weighs placements by."""

    ttft_s: float
    tpot_s: float


class RequestOrigin(NamedTuple):
    """Whose request it is, as far as placement uses it."""

    tenant: str = ""
    session: bytes = b""  # digest of the tenant's session key; empty: none was given


class PlacementQuery(NamedTuple):
    """One request to place."""

    tokens: int  # n: prompt and tokens already emitted
    output: float  # E[out], expected output tokens, at least 2
    kv_bytes: float  # KV bytes of one token on the wire
    familiar: Collection[str] = ()  # workers that served this session last


class PrefillState(NamedTuple):
    """One worker, seen as a candidate for the prefill."""

    instance: str
    model: StepModel
    chunk: int  # prompt tokens in a step
    queue_s: float
    correction: float  # observed over predicted TTFT
    cached: int  # tokens of this prompt in the worker's prefix cache
    coming: int = 0  # those that will be there once the work in its queue is done
    is_short: bool = False  # what is not cached is a short prompt, computed beside longer ones
    beside_s: float = 0.0  # by which it takes longer beside these
    awaiting: float = 0.0  # other requests that wait in routers for its time

    @property
    def reusable(self) -> int:
        """Return the tokens of the prompt that it will have when it computes the rest."""
        return max(self.cached, self.coming)

    @property
    def busy_s(self) -> float:
        """Return by how many seconds its other prompts delay this one."""
        return self.queue_s + self.beside_s


class DecodeState(NamedTuple):
    """One worker, seen as a candidate for the decode; ``own`` describes it as a prefill worker."""

    own: PrefillState
    batch: int  # requests in the worker
    rows: int  # most sequences in a step; 0: unknown
    kv_used: int  # tokens of live sequences, as reported
    kv_free: int  # tokens that still fit beside all that was promised, also since the report
    kv_total: int  # 0: unknown
    speculation: SpeculationProfile | None = None  # None: it drafts nothing
    kv_unused: int = 0  # tokens that no sequence holds or waits for yet; 0: not known

    @property
    def instance(self) -> str:
        return self.own.instance

    @property
    def cached(self) -> int:
        return self.own.cached

    @property
    def reusable(self) -> int:
        return self.own.reusable


class LinkEstimates(NamedTuple):
    """Estimates of the links between workers; each mapping has keys (source, target)."""

    bandwidth: Mapping[tuple[str, str], float]  # bytes/s
    path_s: Mapping[tuple[str, str], float]
    active: Mapping[tuple[str, str], int]  # transfers in flight
    default_bandwidth: float

    def share(self, source: str, target: str) -> float:
        """Return the bytes/s that one more transfer would get."""
        link = (source, target)
        found = self.bandwidth.get(link, self.default_bandwidth)
        return found / (1 + self.active[link]) if link in self.active else found


class PrefixSource(NamedTuple):
    """A worker that has a prefix of the prompt, which others may fetch."""

    instance: str
    tokens: int
    wait_s: float = 0.0  # until it looks the prefix up, which it does between two steps


class PrefixFetch(NamedTuple):
    """A cached prefix that the prefill worker fetches from a peer before it computes the rest."""

    source: str
    tokens: int  # length of the prefix, whole blocks
    seconds: float
    wait_s: float  # of these, until the source looks the prefix up


class PlacementSnapshot(NamedTuple):
    """State of all workers and links at the time of one decision."""

    prefill: Sequence[PrefillState]
    decode: Sequence[DecodeState]
    network: LinkEstimates
    resident_output: float  # mean output tokens of a request
