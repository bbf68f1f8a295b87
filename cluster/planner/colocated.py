"""The same load on colocated workers, which prefill and decode: an analytic estimate. Pure.

Prompts go in chunks that keep a step within the TPOT objective. With b sequences that decode and u
prompt tokens a step takes

    mixed   max(products of b rows and u tokens, weights) + max(attention of both, KV) + overhead
    apart   a pass over the b rows, and one over the u tokens

(FLOPs and bytes by the machine's rates). In mixed steps, prompts are computed while weights are
read (Agrawal et al., "Sarathi-Serve", 2024, section 4), as Baton's own workers do; separate steps
are what two pools were first compared with (Zhong et al., "DistServe", 2024, section 2).

A prompt of n tokens takes ceil(n/u)*t, and b = rate*E[o]*t'/tau sequences decode (Little), where t'
is the mean step: t while a prompt is computed, else a plain one. Prompts wait as in the sizing
policy, with the same share of late ones. The estimate favours colocated workers: it leaves out
prompts that arrive together at one of them while others idle, and steps longer than their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cluster.planner.gpus import GpuSpec
from cluster.planner.model_shape import PassWork
from cluster.planner.pools import PlanRequest
from cluster.planner.roofline import decode_step_s, gpu_rates, kv_pool_tokens, largest_where
from cluster.sizing.demand import MAX_LATE_SHARE
from cluster.sizing.queueing import late_share, weighted_mean, weighted_quantile
from cluster.sizing.snapshot import RequestSample

_ROUNDS = 20
_SETTLED = 1e-3
_BUDGETS = (1.0, 0.7, 0.5)
"""Shares of the TPOT objective that steps may take; shorter steps hold fewer sequences at a
time."""


class ColocatedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Colocated workers, each at its load. ``step_s``: seconds of a step while a prompt is
    computed."""

    gpu: GpuSpec
    workers: int
    batch: float
    prompt_tokens: int  # in a step
    step_s: float

    @property
    def usd_per_hour(self) -> float | None:
        price = self.gpu.usd_per_hour
        return None if price is None else price * self.workers


def plan_colocated(
    request: PlanRequest, gpu: GpuSpec, rate: float, pace: float, most: int, *, mixed: bool
) -> ColocatedPlan | None:
    """Return the least number of workers; None where no number up to ``most`` meets both
    objectives."""

    def meets(workers: int) -> ColocatedPlan | None:
        each = (
            _meets(request, gpu, rate / workers, workers, pace * share, pace, mixed=mixed)
            for share in _BUDGETS
        )
        return next((found for found in each if found is not None), None)

    low, high = 0, 1
    while meets(high) is None:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    return meets(largest_where(lambda workers: meets(workers) is None, low, high - 1) + 1)


def _meets(
    request: PlanRequest,
    gpu: GpuSpec,
    rate: float,
    workers: int,
    budget: float,
    pace: float,
    *,
    mixed: bool,
) -> ColocatedPlan | None:
    """Return the plan for ``rate`` requests/s per worker and steps of ``budget`` TPOT objectives,
    if it is feasible."""
    workload, pool = request.workload, kv_pool_tokens(request.shape, gpu)
    most = min(request.step_sizes("decode").max_batch, pool / (workload.context or 1.0))
    held, found = 0.0, 0.0
    for _ in range(_ROUNDS):
        step = _step(request, gpu, held, budget, mixed=mixed)
        if step is None or held > most:
            return None
        tokens, step_s, plain_s = step
        seconds = [math.ceil(s.uncached / tokens) * step_s for s in workload.mix.samples]
        prefilling = min(1.0, rate * _mean(seconds, workload.mix.samples))
        found = rate * workload.output * (prefilling * step_s + (1 - prefilling) * plain_s) / pace
        if abs(found - held) <= _SETTLED * max(1.0, held):
            break
        held = found
    else:
        return None
    if _late(request, seconds, rate * workers, workers) > MAX_LATE_SHARE:
        return None
    return ColocatedPlan(gpu=gpu, workers=workers, batch=held, prompt_tokens=tokens, step_s=step_s)


def _late(request: PlanRequest, seconds: Sequence[float], rate: float, workers: int) -> float:
    """Return the share of prompts whose first token misses the objective."""
    samples = request.workload.mix.samples
    weights = [s.weight for s in samples]
    service_s = weighted_mean(seconds, weights)
    spread = weighted_mean([(s - service_s) ** 2 for s in seconds], weights) / service_s**2
    patience_s = request.goals.ttft_s - weighted_quantile(seconds, weights, 0.9)
    if patience_s <= 0:
        return 1.0
    return late_share(workers, rate * service_s, service_s, spread, patience_s)


def _step(
    request: PlanRequest, gpu: GpuSpec, held: float, budget: float, *, mixed: bool
) -> tuple[int, float, float] | None:
    """Return the prompt tokens that fit beside ``held`` decoding sequences, the seconds of that
    step, and the seconds of one without them; None where even one token is too much."""
    shape, workload, at = request.shape, request.workload, gpu_rates(gpu, request.efficiency)
    middle = workload.prompt * (1 + workload.shared) / 2  # of the part that is computed
    rows, reached = shape.decode(held, workload.context), shape.reached(middle)

    def seconds(tokens: int) -> float:
        if not mixed:
            return at.seconds(rows) + at.seconds(shape.prompt(max(0, middle - tokens / 2), tokens))
        work = PassWork(
            rows.linear_flops + tokens * shape.cost.row_flops,
            rows.attention_flops + tokens * reached * shape.cost.pair_flops,
            shape.cost.weight_bytes(tokens + round(held)),
            rows.kv_bytes + reached * shape.cost.kv_bytes,
        )
        return at.seconds(work)

    step_s = request.goals.tpot_s * budget
    chunk = request.step_sizes("decode").prefill_chunk
    most = largest_where(lambda tokens: seconds(tokens) <= step_s, 0, chunk)
    if not most:
        return None
    return most, seconds(most), decode_step_s(shape, at, max(1.0, held), workload.context)


def _mean(seconds: Sequence[float], samples: Sequence[RequestSample]) -> float:
    return weighted_mean(seconds, [s.weight for s in samples])
