"""The same load on colocated workers, which prefill and decode: an analytic estimate. Pure.

Prompts go in chunks that keep a step within the TPOT objective. With b sequences that decode, u
prompt tokens are computed

    mixed   in the same step, which reads the weights once for both
    apart   in a step of their own, which those that decode wait for

Mixed steps are those of Agrawal et al., "Sarathi-Serve" (2024, section 4), and of Baton's own
workers; separate steps are what two pools were first compared with (Zhong et al., "DistServe",
2024, section 2).

A prompt of n tokens takes ceil(n/u)*t, and b = rate*E[o]*t'/tau sequences decode (Little), where t'
is the mean step, t while a prompt is computed and else a plain one, and tau the tokens of a
sequence in it. Prompts wait as in the sizing policy, with the same share of late ones. The estimate
favours colocated workers: it leaves out prompts that arrive together at one of them while others
idle, and steps longer than their mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from cluster.planner.gpus import GpuSpec
from cluster.planner.pools import PlanRequest
from cluster.sizing.demand import MAX_LATE_SHARE
from cluster.sizing.queueing import PrefillOutlook, late_share, least_number, service_time
from cluster.sizing.snapshot import MachineModel
from protocol.performance.speculation_profile import decode_pace
from protocol.performance.step_model import StepModel

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
    request: PlanRequest, gpu: GpuSpec, most: int, *, mixed: bool
) -> ColocatedPlan | None:
    """Return the least number of workers; None where no number up to ``most`` meets both
    objectives."""
    machine = request.machine("decode", gpu)

    def meets(workers: int) -> ColocatedPlan | None:
        each = (_meets(request, machine, gpu, workers, share, mixed) for share in _BUDGETS)
        return next((found for found in each if found is not None), None)

    if meets(most) is None:
        return None
    return meets(least_number(lambda workers: meets(workers) is not None, 1))


def _meets(
    request: PlanRequest,
    machine: MachineModel,
    gpu: GpuSpec,
    workers: int,
    budget: float,
    mixed: bool,
) -> ColocatedPlan | None:
    """Return the plan for steps of ``budget`` TPOT objectives, if it is feasible."""
    workload, mix = request.workload, request.workload.mix
    most = min(machine.max_batch, machine.kv_tokens / (workload.context or 1.0))
    weights, each, held = [s.weight for s in mix.samples], mix.rate / workers, 0.0
    for _ in range(_ROUNDS):
        step = _step(request, machine, held, budget, mixed)
        if step is None or held > most:
            return None
        service = service_time([step.prompt_s(s.uncached) for s in mix.samples], weights)
        prefilling = min(1.0, each * service.mean_s)
        mean_s = prefilling * step.seconds + (1 - prefilling) * step.plain_s
        found = each * workload.output * mean_s / step.pace
        if abs(found - held) <= _SETTLED * max(1.0, held):
            break
        held = found
    else:
        return None
    load = mix.rate * service.mean_s
    if late_share(workers, PrefillOutlook(load), service, request.goals.ttft_s) > MAX_LATE_SHARE:
        return None
    return ColocatedPlan(
        gpu=gpu, workers=workers, batch=held, prompt_tokens=step.tokens, step_s=step.seconds
    )


class _MixedStep(NamedTuple):
    tokens: int  # of prompts, beside the sequences that decode
    seconds: float
    plain_s: float  # of a step without them
    pace: float  # tokens of a sequence

    def prompt_s(self, uncached: float) -> float:
        return math.ceil(uncached / self.tokens) * self.seconds


def _step(
    request: PlanRequest, machine: MachineModel, held: float, budget: float, mixed: bool
) -> _MixedStep | None:
    """Return the step with the most prompt tokens beside ``held`` decoding sequences; None where
    even one token is too much."""
    workload, model = request.workload, StepModel(*machine.step)
    pace = decode_pace(model, machine.speculation, held, held * workload.context)
    further_s = 0.0 if mixed else model.step
    left_s = request.goals.tpot_s * budget * pace.tokens - pace.seconds - further_s
    middle = round(workload.prompt * (1 + workload.shared) / 2)  # of the part that is computed
    tokens = int(min(machine.chunk, model.prompt_tokens_within(left_s, middle)))
    if not tokens:
        return None
    seconds = pace.seconds + further_s + model.prompt_s(middle, tokens)
    return _MixedStep(tokens, seconds, max(pace.seconds, model.decode_s(1, 0)), pace.tokens)
