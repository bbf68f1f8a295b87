"""Finds what limits the pools of a plan. Pure.

The walls compute, bandwidth, capacity and network are those that a live cluster reports
(router/walls), here of a worker with as much work as its objectives allow. ``cost``: the smallest
pool is larger than the load needs, so that its price binds.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from cluster.planner.pools import MAX_BATCH_BOUND, PlanRequest, PoolPlan, SizedPools, size_pools
from cluster.planner.roofline import step_model
from engine.ipc.settings import default_step_sizes
from engine.kv_cache.kv_format import Codec
from protocol.performance.step_model import StepWork
from protocol.registry.directory import Wall, WorkerUtilisation
from router.walls import techniques
from router.walls.techniques import Technique

PlannedWall: TypeAlias = Literal[Wall, "cost"]

IDLE_SHARE = 0.5
"""Below this share of a single worker the price of the pool binds."""


class PoolBottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What limits a pool. ``why``: a reason for readers. ``relax``: techniques, the best first.
    ``compute`` and ``bandwidth``: shares of the reachable rates in a step with as much work as is
    allowed."""

    wall: PlannedWall
    why: str
    relax: tuple[Technique, ...]
    compute: float
    bandwidth: float


def find_bottleneck(request: PlanRequest, sized: SizedPools, pool: PoolPlan) -> PoolBottleneck:
    """Return what limits a pool."""
    figures = _figures(request, sized, pool)
    prefill = pool.role == "prefill"
    wall, why = _prefill_wall(pool, figures) if prefill else _decode_wall(sized, figures)
    if pool.need.link_floor >= pool.workers > 1:
        wall, why = "network", "the workers' links bind first"
    elif pool.workers == 1 and pool.busy < IDLE_SHARE:
        wall, why = "cost", f"a pool has at least one worker; it is {pool.busy:.0%} busy"
    full = pool.role == "decode" and sized.ceilings.binds == "max_batch"
    observed = techniques.PoolProfile(
        pool.role, pool.workers, figures, int(full), sized.ceilings.max_batch
    )
    relax = _cheaper_gpu(pool) if wall == "cost" else techniques.rank_techniques(observed, wall)
    if pool.role == "prefill" and wall == "bandwidth":
        relax = [_larger_chunk(figures), *relax]
    return PoolBottleneck(
        wall=wall, why=why, relax=tuple(relax), compute=figures.compute, bandwidth=figures.bandwidth
    )


def _prefill_wall(pool: PoolPlan, figures: WorkerUtilisation) -> tuple[PlannedWall, str]:
    if figures.compute >= figures.bandwidth:
        return "compute", f"FLOPs of a chunk of {pool.machine.chunk} tokens"
    chunk = f"a chunk of {pool.machine.chunk} tokens"
    return "bandwidth", f"reading the weights takes longer than computing {chunk}"


def _decode_wall(sized: SizedPools, figures: WorkerUtilisation) -> tuple[PlannedWall, str]:
    side: PlannedWall = "compute" if figures.compute > figures.bandwidth else "bandwidth"
    size = sized.ceilings.size
    if sized.ceilings.binds == "kv":
        return "capacity", f"the KV pool holds {size} sequences"
    if sized.ceilings.binds == "max_batch":
        return side, f"max_batch allows {size} sequences; KV and TPOT would allow more"
    return side, f"a step of {size} sequences takes as long as the TPOT objective allows"


def _figures(request: PlanRequest, sized: SizedPools, pool: PoolPlan) -> WorkerUtilisation:
    """Return the utilisation that a worker of the pool would report with as much work as is
    allowed."""
    work, at = _work(request, sized, pool), request.rates(pool.role)
    shape, kv = request.shape, request.shape.kv
    rows = pool.machine.chunk if pool.role == "prefill" else sized.ceilings.size
    both, compute, memory = (
        step_model(shape, rates, request.workload.context, rows)
        for rates in (at, at.compute_alone, at.memory_alone)
    )
    seconds, moved_s = both.seconds(work), memory.seconds(work)
    fp8 = shape.wire_bytes(Codec.FP8)
    return WorkerUtilisation(
        seconds=1.0,
        busy=1.0,
        compute=compute.seconds(work) / seconds,
        bandwidth=moved_s / seconds,
        capacity=1.0 if sized.ceilings.binds == "kv" else 0.0,
        network=0.0,
        starved=0.0,
        kv_wait=0.0,
        batch=float(sized.ceilings.size) if pool.role == "decode" else 0.0,
        kv_share=memory.kv_token * work.decode_kv_tokens / moved_s,
        element_bytes=shape.weight_element_bytes,
        kv_shrink=shape.wire_bytes(Codec.RAW) / fp8 if kv.storage == "wide" else 1.0,
        wire_shrink=shape.wire_bytes(shape.codec) / fp8,
        gpu=True,
        drafts=request.drafting is not None,
    )


def _work(request: PlanRequest, sized: SizedPools, pool: PoolPlan) -> StepWork:
    load, size = request.workload, sized.ceilings.size
    if pool.role == "decode":
        return StepWork(decode_rows=size, decode_kv_tokens=round(size * load.context))
    tokens = min(pool.machine.chunk, round(load.prompt * (1 - load.shared)))
    middle = load.prompt * (1 + load.shared) / 2
    return StepWork(prompt_tokens=tokens, prompt_pairs=tokens * middle)


def _larger_chunk(figures: WorkerUtilisation) -> Technique:
    """Return the gain of a chunk twice as large, which reads the weights once for both halves."""
    gain = 2.0 / max(1.0, 2.0 * figures.compute)
    return Technique("a larger chunk", gain, "the next prompt waits longer")


def _cheaper_gpu(pool: PoolPlan) -> list[Technique]:
    gain = 1.0 / max(pool.busy, 0.05)
    return [Technique("a cheaper GPU", gain, "less headroom for bursts; objectives may be missed")]


def batch_advice(request: PlanRequest, sized: SizedPools) -> list[str]:
    """Return a sentence on what a larger `max_batch` of decode workers would save: the default of a
    worker on a GPU, or twice the present one. Empty where another bound binds, or none is saved."""
    ceilings, now = sized.ceilings, sized.pools["decode"].workers
    default = default_step_sizes("cuda", "decode").max_batch
    larger = default if ceilings.max_batch < default else 2 * ceilings.max_batch
    if ceilings.binds != "max_batch" or larger > MAX_BATCH_BOUND:
        return []
    found = size_pools(msgspec.structs.replace(request, max_batch=larger))
    needed, tpot_s = found.pools["decode"].workers, found.predicted.tpot_s
    if needed >= now:
        return []
    pace = "" if tpot_s is None else f", at a mean TPOT of {tpot_s * 1e3:.3g} ms"
    return [
        f"max_batch {ceilings.max_batch} binds the decode pool: max_batch {larger} would need"
        f" {needed} decode workers instead of {now}{pace} (--max-batch {larger})."
    ]
