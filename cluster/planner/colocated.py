"""The same load on workers that prefill and decode both: an analytic estimate. Pure.

Prompts go in chunks as large as keep a step within the TPOT objective. With b sequences that decode
and u prompt tokens a step takes

    mixed   max(products of b rows and u tokens, weights) + max(attention of both, KV) + overhead
    apart   a pass over the b rows, and one over the u tokens

(FLOPs and bytes by the machine's rates). Mixed, prompts are computed while weights are read
(Agrawal et al., "Sarathi-Serve", 2024, section 4), as Baton's own workers do it; apart is what
two pools were first held against (Zhong et al., "DistServe", 2024, section 2). A prompt of n tokens
takes ceil(n/u)*t, and b = rate*E[o]*t'/tau sequences are there (Little), t' the mean step: t while
a prompt is computed, else a plain one. Prompts wait as the policy has them wait, with the same
share of late ones. What is left out is to the good of unsplit workers: prompts that arrive together
at one of them while others idle, and steps longer than their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cluster.planner.gpus import Gpu
from cluster.planner.model_shape import Work
from cluster.planner.pools import Wanted
from cluster.planner.roofline import decode_s, kv_tokens, rates
from cluster.sizing.demand import LATE
from cluster.sizing.moments import late_share, mean, quantile
from cluster.sizing.snapshot import Sample

_ROUNDS = 20
_SETTLED = 1e-3
_BUDGETS = (1.0, 0.7, 0.5)
"""Of the TPOT objective, that steps take: shorter ones hold fewer sequences at a time."""


class Unsplit(msgspec.Struct, frozen=True, kw_only=True):
    """Each worker at its load. ``step_s``: while a prompt is computed."""

    gpu: Gpu
    workers: int
    batch: float
    prompt_tokens: int  # in a step
    step_s: float

    @property
    def usd_per_hour(self) -> float | None:
        price = self.gpu.usd_per_hour
        return None if price is None else price * self.workers


def unsplit(
    wanted: Wanted, gpu: Gpu, rate: float, pace: float, most: int, *, mixed: bool
) -> Unsplit | None:
    """The least number of workers; None where no number up to ``most`` meets both objectives."""

    def meets(workers: int) -> Unsplit | None:
        each = (
            _meets(wanted, gpu, rate / workers, workers, pace * share, pace, mixed=mixed)
            for share in _BUDGETS
        )
        return next((found for found in each if found is not None), None)

    low, high = 0, 1
    while meets(high) is None:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle) is None:
            low = middle
        else:
            high = middle
    return meets(high)


def _meets(
    wanted: Wanted,
    gpu: Gpu,
    rate: float,
    workers: int,
    budget: float,
    pace: float,
    *,
    mixed: bool,
) -> Unsplit | None:
    """With ``rate`` requests a second for each worker, and steps of ``budget`` TPOT objectives at
    most."""
    of, pool = wanted.workload, kv_tokens(wanted.shape, gpu)
    most = min(wanted.max_batch, pool / (of.context or 1.0))
    held, found = 0.0, 0.0
    for _ in range(_ROUNDS):
        step = _step(wanted, gpu, held, budget, mixed=mixed)
        if step is None or held > most:
            return None
        tokens, step_s, plain_s = step
        seconds = [math.ceil(s.uncached / tokens) * step_s for s in of.mix.samples]
        prefilling = min(1.0, rate * _mean(seconds, of.mix.samples))
        found = rate * of.output * (prefilling * step_s + (1 - prefilling) * plain_s) / pace
        if abs(found - held) <= _SETTLED * max(1.0, held):
            break
        held = found
    else:
        return None
    if _late(wanted, seconds, rate * workers, workers) > LATE:
        return None
    return Unsplit(gpu=gpu, workers=workers, batch=held, prompt_tokens=tokens, step_s=step_s)


def _late(wanted: Wanted, seconds: Sequence[float], rate: float, workers: int) -> float:
    """Share of prompts whose first token misses the objective."""
    samples = wanted.workload.mix.samples
    weights = [s.weight for s in samples]
    service_s = mean(seconds, weights)
    spread = mean([(s - service_s) ** 2 for s in seconds], weights) / service_s**2
    patience_s = wanted.goals.ttft_s - quantile(seconds, weights, 0.9)
    if patience_s <= 0:
        return 1.0
    return late_share(workers, rate * service_s, service_s, spread, patience_s)


def _step(
    wanted: Wanted, gpu: Gpu, held: float, budget: float, *, mixed: bool
) -> tuple[int, float, float] | None:
    """Prompt tokens that go beside ``held`` sequences that decode, the seconds of that step, and of
    one without; None where even one token is too much."""
    shape, of, at = wanted.shape, wanted.workload, rates(gpu, wanted.efficiency)
    middle = of.prompt * (1 + of.shared) / 2  # of the part that is computed
    rows, reached = shape.decode(held, of.context), shape.reached(middle)

    def seconds(tokens: int) -> float:
        if not mixed:
            return at.seconds(rows) + at.seconds(shape.prompt(max(0, middle - tokens / 2), tokens))
        work = Work(
            rows.linear_flops + tokens * shape.cost.row_flops,
            rows.attention_flops + tokens * reached * shape.cost.pair_flops,
            shape.cost.weight_bytes(tokens + round(held)),
            rows.kv_bytes + reached * shape.cost.kv_bytes,
        )
        return at.seconds(work)

    low, high = 0, wanted.chunk + 1
    while high - low > 1:
        tokens = (low + high) // 2
        if seconds(tokens) <= wanted.goals.tpot_s * budget:
            low = tokens
        else:
            high = tokens
    if not low:
        return None
    return low, seconds(low), decode_s(shape, at, max(1.0, held), of.context)


def _mean(seconds: Sequence[float], samples: Sequence[Sample]) -> float:
    return mean(seconds, [s.weight for s in samples])
