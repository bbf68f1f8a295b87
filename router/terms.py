"""What is predicted: of a worker alone, and of a placement. Seconds; costs have no unit."""

from __future__ import annotations

from typing import NamedTuple

from router.snapshot import Fetch


class PrefillTerms(NamedTuple):
    """One prefill worker, whatever the decode worker."""

    instance: str
    cached: int
    fetch: Fetch | None
    queue_s: float
    prefill_s: float
    ttft_s: float  # without the path
    correction: float
    tail: int  # tokens of the last chunk: their KV is still to go when the first token is out
    load: float  # its queue, as a share of the objective


class DecodeTerms(NamedTuple):
    """One decode worker, whatever the prefill worker."""

    instance: str
    cached: int
    missing: int  # tokens whose KV it lacks
    batch: int
    busy: float  # its batch, as a share of what it takes
    step_s: float  # of one token of each sequence
    wait_s: float  # for pages and a row
    imposed: float
    eviction: float
    fits: bool


class Terms(NamedTuple):
    """What is predicted of a placement. ``cost`` is the sum of the four before it."""

    queue_s: float
    fetch_s: float
    prefill_s: float
    ttft_s: float
    wire_s: float
    wait_s: float
    ready_s: float
    step_s: float
    tpot_s: float
    ttft_cost: float
    tpot_cost: float
    imposed: float
    eviction: float
    cost: float


class Placement(NamedTuple):
    """One candidate. ``prefill`` is None where D computes the prompt itself."""

    prefill: str | None
    p: PrefillTerms  # of who computes
    d: DecodeTerms
    load: float
    ttft_s: float
    wire_s: float
    ready_s: float
    tpot_s: float
    ttft_cost: float
    tpot_cost: float
    imposed: float
    cost: float

    @property
    def decode(self) -> str:
        return self.d.instance

    @property
    def terms(self) -> Terms:
        p, d = self.p, self.d
        fetch_s = p.fetch.seconds if p.fetch else 0.0
        return Terms(
            *(p.queue_s, fetch_s, p.prefill_s, self.ttft_s, self.wire_s, d.wait_s),
            *(self.ready_s, d.step_s, self.tpot_s),
            *(self.ttft_cost, self.tpot_cost, self.imposed, d.eviction, self.cost),
        )
