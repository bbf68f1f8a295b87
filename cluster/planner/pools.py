"""Sizes the pools of a plan with the sizing policy's own arithmetic, and finds their bottlenecks.
Pure.

The bottlenecks (walls) compute, bandwidth, capacity and network are those that a live cluster
reports (router/walls), here of a worker with as much work as its objectives allow. ``cost``: the
smallest pool is larger than the load needs, so that its price binds.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from cluster.planner.gpus import GpuSpec
from cluster.planner.model_shape import ModelShape, PassWork
from cluster.planner.roofline import (
    ASSUMED,
    DraftingOptions,
    Efficiency,
    GpuRates,
    decode_step_s,
    gpu_rates,
    gpu_step_sizes,
    largest_batch_within,
    machine_model,
    steady_pace,
)
from cluster.planner.workload import Workload
from cluster.sizing.decision import PredictedLatency, RoleDemand, Slo, infeasible_slos
from cluster.sizing.demand import NO_CORRECTIONS, decode_batch_limits, demand_by_role
from cluster.sizing.predict import predict_latency
from cluster.sizing.queueing import prefill_service, resident_sequences
from cluster.sizing.snapshot import MachineModel, RequestMix, RoleValues, SloTargets
from engine.ipc.settings import StepSizes
from engine.kv_cache.kv_format import Codec
from protocol.errors import StartupError
from protocol.performance.step_model import StepModel
from protocol.registry.directory import Wall, WorkerUtilisation
from protocol.roles import ROLES, Role
from router.walls import techniques
from router.walls.techniques import Technique

MAX_PLANNED_WORKERS = 10_000
MAX_BATCH_BOUND = 65536
BatchCeiling = Literal["tpot", "kv", "max_batch"]


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a plan. ``chunk`` and ``max_batch``: None for what a worker on a GPU takes by
    default. ``link_bytes_s``: of each worker, None: as in the data file of GPUs."""

    shape: ModelShape
    workload: Workload
    goals: SloTargets
    gpus: dict[Role, GpuSpec]
    chunk: int | None = None
    max_batch: int | None = None
    efficiency: Efficiency = ASSUMED
    link_bytes_s: float | None = None
    drafting: DraftingOptions | None = None

    def rates(self, role: Role) -> GpuRates:
        return gpu_rates(self.gpus[role], self.efficiency)

    def step_sizes(self, role: Role) -> StepSizes:
        return gpu_step_sizes(role, self.max_batch, self.chunk)


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one role. ``busy``: mean share of them that the load takes."""

    role: Role
    gpu: GpuSpec
    workers: int
    need: RoleDemand
    machine: MachineModel
    busy: float

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the pool's workers; None where the GPU's price is unknown."""
        price = self.gpu.usd_per_hour
        return None if price is None else self.workers * price


class BatchCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """The most sequences that a decode worker can hold, by each bound; the least is the batch."""

    tpot: int
    kv: int
    max_batch: int
    size: int
    binds: BatchCeiling


class SizedPools(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of both pools. ``least_ttft_s``: seconds within which 90% of prompts are computed
    on an idle worker. ``least_tpot_s``: of a single sequence. ``infeasible``: objectives below
    those, which no number of workers meets."""

    pools: dict[Role, PoolPlan]
    ceilings: BatchCeilings
    pace: float  # tokens of a sequence in the time of a step without drafts
    predicted: PredictedLatency
    least_ttft_s: float
    least_tpot_s: float
    infeasible: tuple[Slo, ...]

    @property
    def workers(self) -> int:
        return sum(pool.workers for pool in self.pools.values())

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all workers; None where a GPU's price is unknown."""
        prices = [pool.usd_per_hour for pool in self.pools.values()]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None


def size_pools(request: PlanRequest, rate: float | None = None) -> SizedPools:
    """Size both pools; ``rate`` replaces the workload's own. Raises StartupError if a model does
    not fit."""
    plain = _machines(request, 1.0)
    pace = _pace(request, plain["decode"])
    machines = _machines(request, pace) if pace > 1.0 else plain
    workload = request.workload
    mix = msgspec.structs.replace(
        workload.at(workload.mix.rate if rate is None else rate), pace=pace
    )
    _check_load(mix, machines)
    need = demand_by_role(mix, machines, request.goals, NO_CORRECTIONS)
    _check_workers(max(demand.link_floor for demand in need.values()))
    pools = {role: _pool(request, role, need[role], machines[role]) for role in ROLES}
    alone_s = decode_step_s(request.shape, request.rates("decode"), 1, workload.context)
    least = prefill_service(mix, machines["prefill"]).q90_s, alone_s / pace
    return SizedPools(
        pools=pools,
        ceilings=_ceilings(request, mix, machines["decode"]),
        pace=pace,
        predicted=predict_latency(
            mix,
            machines,
            RoleValues(prefill=pools["prefill"].workers, decode=pools["decode"].workers),
            NO_CORRECTIONS,
        ),
        least_ttft_s=least[0],
        least_tpot_s=least[1],
        infeasible=infeasible_slos(need),
    )


def _check_load(mix: RequestMix, machines: dict[Role, MachineModel]) -> None:
    """Raise StartupError for a load that cannot be planned for."""
    decode = machines["decode"]
    held = resident_sequences(mix, decode)
    if held.kv_tokens * (1.0 + held.transit) > decode.kv_tokens:
        raise StartupError(
            f"a sequence holds {held.kv_tokens:,.0f} tokens while it decodes, and a decode worker's"
            f" KV pool takes {decode.kv_tokens:,}: use a GPU with more memory, or fp8 KV"
        )
    prompts = mix.rate * prefill_service(mix, machines["prefill"]).mean_s
    alone_s = StepModel(*decode.step).decode_s(1, held.kv_tokens)
    sequences = mix.rate * held.output * alone_s / mix.pace / decode.max_batch
    _check_workers(max(prompts, sequences))


def _check_workers(workers: float) -> None:
    if workers > MAX_PLANNED_WORKERS:
        raise StartupError(
            f"this load wants {workers:,.0f} workers and more; plans are for up to"
            f" {MAX_PLANNED_WORKERS:,} of a role"
        )


def _machines(request: PlanRequest, pace: float) -> dict[Role, MachineModel]:
    return {
        role: machine_model(
            request.shape,
            request.gpus[role],
            context=request.workload.context,
            tpot_s=request.goals.tpot_s,
            chunk=request.step_sizes(role).prefill_chunk,
            max_batch=request.step_sizes(role).max_batch,
            pace=pace,
            efficiency=request.efficiency,
            link_bytes_s=request.link_bytes_s,
        )
        for role in ROLES
    }


def _pool(request: PlanRequest, role: Role, need: RoleDemand, machine: MachineModel) -> PoolPlan:
    workers = max(1, need.workers)
    full = workers * (1.0 if role == "prefill" else need.each)
    return PoolPlan(
        role=role,
        gpu=request.gpus[role],
        workers=workers,
        need=need,
        machine=machine,
        busy=min(1.0, need.load / full),
    )


def _ceilings(request: PlanRequest, mix: RequestMix, machine: MachineModel) -> BatchCeilings:
    """Return each bound by itself; the policy's own limits are all cut at ``max_batch``."""
    size = decode_batch_limits(mix, machine, request.goals).size
    held = resident_sequences(mix, machine)
    by_kv = math.floor(machine.kv_tokens / (held.kv_tokens * (1.0 + held.transit)))
    by_tpot = largest_batch_within(
        request.shape,
        request.rates("decode"),
        request.goals.tpot_s * mix.pace,
        request.workload.context,
        MAX_BATCH_BOUND,
    )
    bounds: dict[BatchCeiling, int] = {"tpot": by_tpot, "kv": by_kv, "max_batch": machine.max_batch}
    return BatchCeilings(
        tpot=by_tpot,
        kv=by_kv,
        max_batch=machine.max_batch,
        size=size,
        binds=min(bounds, key=lambda name: bounds[name]),
    )


def _pace(request: PlanRequest, machine: MachineModel) -> float:
    if request.drafting is None:
        return 1.0
    context = request.workload.context
    most = max(1, min(machine.max_batch, math.floor(machine.kv_tokens / max(1.0, context))))
    at, tpot_s = request.rates("decode"), request.goals.tpot_s
    return steady_pace(request.shape, at, context, tpot_s, most, request.drafting)


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
        wall, why = "network", "the links alone want so many workers"
    elif pool.workers == 1 and pool.busy < IDLE_SHARE:
        wall, why = "cost", f"one worker, {pool.busy:.0%} busy, is the least there is"
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
    return "bandwidth", f"a chunk of {pool.machine.chunk} tokens is read for longer than computed"


def _decode_wall(sized: SizedPools, figures: WorkerUtilisation) -> tuple[PlannedWall, str]:
    side: PlannedWall = "compute" if figures.compute > figures.bandwidth else "bandwidth"
    size = sized.ceilings.size
    if sized.ceilings.binds == "kv":
        return "capacity", f"the KV pool holds {size} sequences"
    if sized.ceilings.binds == "max_batch":
        return side, f"max_batch allows {size} sequences; KV and TPOT would allow more"
    return side, f"a step of {size} sequences takes all that the TPOT objective allows"


def _figures(request: PlanRequest, sized: SizedPools, pool: PoolPlan) -> WorkerUtilisation:
    """Return the utilisation that a worker of the pool would report with as much work as is
    allowed."""
    work = _work(request, sized, pool)
    at = request.rates(pool.role)
    seconds = at.seconds(work)
    shape, kv = request.shape, request.shape.kv
    fp8 = shape.wire_bytes(Codec.FP8)
    return WorkerUtilisation(
        seconds=1.0,
        busy=1.0,
        compute=min(1.0, work.flops / at.flops / seconds),
        bandwidth=min(1.0, work.bytes / at.bytes_s / seconds),
        capacity=1.0 if sized.ceilings.binds == "kv" else 0.0,
        network=0.0,
        starved=0.0,
        kv_wait=0.0,
        batch=float(sized.ceilings.size) if pool.role == "decode" else 0.0,
        kv_share=work.kv_bytes / work.bytes,
        element_bytes=shape.element_bytes,
        kv_shrink=shape.wire_bytes(Codec.RAW) / fp8 if kv.storage == "wide" else 1.0,
        wire_shrink=shape.wire_bytes(shape.codec) / fp8,
        gpu=True,
        drafts=request.drafting is not None,
    )


def _work(request: PlanRequest, sized: SizedPools, pool: PoolPlan) -> PassWork:
    load = request.workload
    if pool.role == "decode":
        return request.shape.decode(sized.ceilings.size, load.context)
    computed = load.prompt * load.shared
    middle = (computed + load.prompt) / 2
    tokens = min(pool.machine.chunk, load.prompt - computed)
    return request.shape.prompt(max(0.0, middle - tokens / 2), tokens)


def _larger_chunk(figures: WorkerUtilisation) -> Technique:
    """Return the gain of a chunk twice as large, which reads the weights once for both halves."""
    gain = 2.0 / max(1.0, 2.0 * figures.compute)
    return Technique("a larger chunk", gain, "a prompt behind it waits longer")


def _cheaper_gpu(pool: PoolPlan) -> list[Technique]:
    gain = 1.0 / max(pool.busy, 0.05)
    return [Technique("a cheaper GPU", gain, "less room for bursts; its objectives may be missed")]
