"""Sizes the pools of a plan with the sizing policy's own arithmetic. Pure."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
from msgspec.structs import replace

from cluster.planner.gpus import GpuSpec
from cluster.planner.model_shape import ModelShape
from cluster.planner.roofline import (
    ASSUMED,
    DraftingOptions,
    Efficiency,
    GpuRates,
    gpu_rates,
    machine_model,
)
from cluster.planner.workload import Workload
from cluster.sizing.decision import PredictedLatency, RoleDemand, Slo, infeasible_slos
from cluster.sizing.demand import demand_by_role
from cluster.sizing.predict import predict_latency
from cluster.sizing.queueing import prefill_service
from cluster.sizing.residency import ResidentSequences, decode_batch_limits, resident_sequences
from cluster.sizing.snapshot import NO_CORRECTIONS, MachineModel, RequestMix, RoleValues, SloTargets
from protocol.errors import StartupError
from protocol.roles import ROLES, Role

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

    def at_rate(self, rate: float) -> PlanRequest:
        """Return the same request with another number of requests/s."""
        workload = replace(self.workload, mix=replace(self.workload.mix, rate=rate))
        return replace(self, workload=workload)

    def rates(self, role: Role) -> GpuRates:
        return gpu_rates(self.shape, self.gpus[role], self.efficiency)

    def machine(self, role: Role, gpu: GpuSpec | None = None) -> MachineModel:
        """Return a worker of the role; ``gpu`` replaces that of its pool. Raises StartupError for a
        model that does not fit."""
        gpu = gpu or self.gpus[role]
        drafting = self.drafting if role == "decode" else None  # as `baton up` sets it
        machine = machine_model(
            self.shape,
            gpu,
            role,
            context=self.workload.context,
            chunk=self.chunk,
            max_batch=self.max_batch,
            efficiency=self.efficiency,
            link_bytes_s=self.link_bytes_s,
            draft=drafting.model if drafting else None,
        )
        if drafting is None:
            return machine
        drafts = drafting.profile(machine, self.shape, gpu, self.efficiency, self.workload)
        return replace(machine, speculation=drafts)


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one role. ``busy``: mean share of them that the load takes."""

    role: Role
    gpu: GpuSpec
    workers: int
    need: RoleDemand
    machine: MachineModel
    busy: float

    @property
    def stepping(self) -> float:
        """Share of the time in which a worker runs steps. Prefill: the share that is busy. Decode:
        the probability that it has a sequence, whose number is Poisson (M/G/infinity)."""
        if self.role == "prefill":
            return self.busy
        return 1.0 - math.exp(-self.need.load / self.workers)

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


def size_pools(request: PlanRequest) -> SizedPools:
    """Size both pools. Raises StartupError if a model does not fit."""
    machines, mix = {role: request.machine(role) for role in ROLES}, request.workload.mix
    resident = resident_sequences(mix, machines["decode"], prefill=machines["prefill"])
    _check_load(mix, machines, resident)
    need = demand_by_role(mix, machines, request.goals, NO_CORRECTIONS)
    _check_workers(max(demand.link_floor for demand in need.values()))
    pools = {role: _pool(request, role, need[role], machines[role]) for role in ROLES}
    servers = RoleValues(prefill=pools["prefill"].workers, decode=pools["decode"].workers)
    return SizedPools(
        pools=pools,
        ceilings=_ceilings(resident, request.goals),
        predicted=predict_latency(mix, machines, servers),
        least_ttft_s=prefill_service(mix, machines["prefill"]).quantile_s(0.9),
        least_tpot_s=resident.tpot_s(1.0),
        infeasible=infeasible_slos(need),
    )


def _check_load(
    mix: RequestMix, machines: dict[Role, MachineModel], resident: ResidentSequences
) -> None:
    """Raise StartupError for a load that cannot be planned for."""
    prefill, decode = machines["prefill"], machines["decode"]
    longest = max(sample.uncached + sample.cached for sample in mix.samples)
    if longest > prefill.kv_tokens:
        raise StartupError(
            f"a prompt has {longest:,.0f} tokens, and a prefill worker's KV pool takes"
            f" {prefill.kv_tokens:,}: use a GPU with more memory (--prefill-gpu), more of them for"
            " each worker (--tp), or fp8 KV"
        )
    if resident.kv_tokens > decode.kv_tokens:
        raise StartupError(
            f"a sequence holds {resident.kv_tokens:,.0f} tokens while it decodes, and a decode"
            f" worker's KV pool takes {decode.kv_tokens:,}: use a GPU with more memory"
            " (--decode-gpu), more of them for each worker (--tp), or fp8 KV"
        )
    prompts = mix.rate * prefill_service(mix, prefill).mean_s
    sequences = mix.rate * resident.output * resident.tpot_s(1.0)
    _check_workers(max(prompts, sequences / decode.max_batch))


def _check_workers(workers: float) -> None:
    if workers > MAX_PLANNED_WORKERS:
        raise StartupError(
            f"this load needs at least {workers:,.0f} workers; plans are for up to"
            f" {MAX_PLANNED_WORKERS:,} of a role"
        )


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


def _ceilings(resident: ResidentSequences, goals: SloTargets) -> BatchCeilings:
    """Return each bound by itself; the policy's own limits are all cut at ``max_batch``."""
    machine = resident.machine
    unbound = replace(machine, max_batch=MAX_BATCH_BOUND)
    limits = decode_batch_limits(resident._replace(machine=unbound), goals)
    bounds: dict[BatchCeiling, int] = {
        "tpot": int(limits.by_tpot),
        "kv": int(limits.by_kv),
        "max_batch": machine.max_batch,
    }
    binds = min(bounds, key=lambda name: bounds[name])
    return BatchCeilings(**bounds, size=max(1, bounds[binds]), binds=binds)
