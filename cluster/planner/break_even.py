"""Where techniques begin or cease to pay: drafts, fp8 on the wire, two pools. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import msgspec
import numpy as np

from cluster.planner.colocated import ColocatedPlan, plan_colocated
from cluster.planner.pools import PlanRequest, SizedPools, size_pools
from cluster.planner.roofline import DraftingOptions
from cluster.sizing.queueing import least_number, prefill_service
from engine.kv_cache.kv_format import Codec
from protocol.performance.speculation_profile import decode_pace
from protocol.performance.step_model import StepModel

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)

LARGEST_BATCH = 512
"""Largest batch for which drafts are evaluated."""
LOOSEST_S = 0.2
"""TPOT objective up to which two pools are compared with colocated workers."""
SPLIT_SAMPLES = 24


class SpeculationPayoff(msgspec.Struct, frozen=True, kw_only=True):
    """The gain of speculation at one acceptance. ``speedup``: tokens/s over plain decoding at the
    planned batch, 1 where drafts do not pay. ``pays_up_to``: a batch; LARGEST_BATCH: at least to
    there."""

    acceptance: float
    speedup: float
    pays_up_to: int


class WirePayoff(msgspec.Struct, frozen=True, kw_only=True):
    """KV bytes of a token as computed and in fp8.

    ``hidden_*``: GB/s of a link from which on a prompt's KV is sent as fast as it is computed.
    ``fp8_below``: GB/s of a link below which the conversion to fp8 and back takes less time than it
    saves. ``ms_*``: milliseconds of the mean prompt's KV on the planned link. ``codec``: the one
    that ``auto`` selects.
    """

    raw_bytes: float
    fp8_bytes: float
    hidden_raw: float
    hidden_fp8: float
    fp8_below: float
    ms_raw: float
    ms_fp8: float
    codec: str


class SplitSample(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of workers at one TPOT objective; None: no number meets it."""

    tpot_s: float
    split: int
    mixed: int | None
    apart: int | None


class SplitPayoff(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of two pools compared with colocated ones.

    ``mixed`` and ``apart``: the best of colocated workers on the GPU of either pool (see
    ``colocated.py``), None: no number of them meets both objectives. ``looks``: the same over TPOT
    objectives from the least that is possible to LOOSEST_S.
    """

    split: int
    mixed: ColocatedPlan | None
    apart: ColocatedPlan | None
    looks: tuple[SplitSample, ...]

    @property
    def pays(self) -> list[tuple[float, float]]:
        """Ranges of the TPOT objective in which two pools need no more workers than mixed steps."""
        runs = groupby(self.looks, lambda s: s.mixed is None or s.split <= s.mixed)
        found = [[sample.tpot_s for sample in run] for pays, run in runs if pays]
        return [(run[0], run[-1]) for run in found]


def speculation_payoffs(request: PlanRequest, sized: SizedPools) -> list[SpeculationPayoff]:
    """Return the gain of speculation for several acceptances."""
    planned = [request.drafting.acceptance] if request.drafting else []

    def payoff(acceptance: float) -> SpeculationPayoff:
        speedup = speculation_speedup(request, acceptance)

        def ceases(batch: int) -> bool:
            return batch > LARGEST_BATCH or speedup(batch) <= 1.0

        return SpeculationPayoff(
            acceptance=acceptance,
            speedup=speedup(sized.ceilings.size),
            pays_up_to=least_number(ceases, 1) - 1,
        )

    return [payoff(acceptance) for acceptance in sorted({*ACCEPTANCES, *planned})]


def speculation_speedup(request: PlanRequest, acceptance: float) -> Callable[[int], float]:
    """Return a function of the batch: the tokens/s of a decode worker that drafts over those of
    one that does not."""
    drafting = request.drafting or DraftingOptions(acceptance=acceptance)
    drafting = msgspec.structs.replace(drafting, acceptance=acceptance)
    machine = msgspec.structs.replace(request, drafting=drafting).machine("decode")
    model, context = StepModel(*machine.step), request.workload.context

    def speedup(batch: int) -> float:
        pace = decode_pace(model, machine.speculation, batch, batch * context)
        return model.decode_s(batch, batch * context) / pace.tpot_s

    return speedup


def wire_payoff(request: PlanRequest, sized: SizedPools) -> WirePayoff:
    """Return the gain of fp8 on the wire. A conversion reads all KV in one form and writes it in
    the other, on both ends."""
    shape, workload = request.shape, request.workload
    raw, fp8 = shape.wire_bytes(Codec.RAW), shape.wire_bytes(Codec.FP8)
    turning_s = sum((raw + fp8) / request.rates(role).bytes_s for role in request.gpus)
    machine = sized.pools["prefill"].machine
    computed_s = (
        prefill_service(workload.mix, machine).mean_s / workload.prompt
    )  # for each token that is sent
    link = machine.link_bytes_s
    return WirePayoff(
        raw_bytes=raw,
        fp8_bytes=fp8,
        hidden_raw=raw / computed_s / 1e9,
        hidden_fp8=fp8 / computed_s / 1e9,
        fp8_below=(raw - fp8) / turning_s / 1e9,
        ms_raw=workload.prompt * raw / link * 1e3,
        ms_fp8=workload.prompt * fp8 / link * 1e3,
        codec=shape.codec.name.lower(),
    )


def split_payoff(request: PlanRequest, sized: SizedPools) -> SplitPayoff:
    return SplitPayoff(
        split=sized.workers,
        mixed=best_colocated(request, sized, mixed=True),
        apart=best_colocated(request, sized, mixed=False),
        looks=tuple(
            _sample(request, tpot_s)
            for tpot_s in np.geomspace(sized.least_tpot_s * 1.02, LOOSEST_S, SPLIT_SAMPLES).tolist()
        ),
    )


def best_colocated(request: PlanRequest, sized: SizedPools, *, mixed: bool) -> ColocatedPlan | None:
    """Return the cheapest colocated plan."""
    gpus = {gpu.name: gpu for gpu in request.gpus.values()}.values()
    tried = (plan_colocated(request, gpu, 16 * sized.workers, mixed=mixed) for gpu in gpus)
    found = [u for u in tried if u is not None]
    return min(found, key=lambda u: (u.usd_per_hour or 0.0, u.workers), default=None)


def _sample(request: PlanRequest, tpot_s: float) -> SplitSample:
    goals = msgspec.structs.replace(request.goals, tpot_s=tpot_s)
    other = msgspec.structs.replace(request, goals=goals)
    sized = size_pools(other)
    mixed, apart = (best_colocated(other, sized, mixed=way) for way in (True, False))
    return SplitSample(
        tpot_s=tpot_s,
        split=sized.workers,
        mixed=mixed.workers if mixed else None,
        apart=apart.workers if apart else None,
    )
