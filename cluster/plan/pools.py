"""How many workers of each role: the sizing policy's own arithmetic on machines made up. Pure."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from cluster.plan.drafts import Drafting, settled_pace
from cluster.plan.gpus import Gpu
from cluster.plan.machine import ASSUMED, Efficiency, Rates, batch_within, decode_s, machine, rates
from cluster.plan.shape import Shape
from cluster.plan.workload import Workload
from cluster.sizing.decision import Need, Predicted
from cluster.sizing.demand import AS_TOLD, batch, needs
from cluster.sizing.moments import residents, service
from cluster.sizing.predict import predicted
from cluster.sizing.snapshot import Goals, Machine, Mix, Pair
from protocol.errors import StartupError
from protocol.roles import ROLES, Role
from router.step_model import StepModel

MOST_WORKERS = 10_000
Ceiling = Literal["tpot", "kv", "max_batch"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is for. ``link_bytes_s``: of each worker, None: as the GPUs' data file has it."""

    shape: Shape
    workload: Workload
    goals: Goals
    gpus: dict[Role, Gpu]
    chunk: int = 512
    max_batch: int = 64
    efficiency: Efficiency = ASSUMED
    link_bytes_s: float | None = None
    drafting: Drafting | None = None

    def rates(self, role: Role) -> Rates:
        return rates(self.gpus[role], self.efficiency)


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One role's workers. ``busy``: the share of them that the load takes, on average."""

    role: Role
    gpu: Gpu
    workers: int
    need: Need
    machine: Machine
    busy: float


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences that a decode worker can hold together, by each bound; the least is the batch."""

    tpot: int
    kv: int
    max_batch: int
    size: int
    binds: Ceiling


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """``least_ttft_s``: that 90% of prompts need on an idle worker; ``least_tpot_s``: of a sequence
    alone; ``infeasible``: objectives below those, so that no number of workers meets them."""

    pools: dict[Role, Pool]
    ceilings: Ceilings
    pace: float  # tokens that a sequence gets in the time of a plain step
    predicted: Predicted
    least_ttft_s: float
    least_tpot_s: float
    infeasible: tuple[Literal["ttft", "tpot"], ...]

    @property
    def workers(self) -> int:
        return sum(pool.workers for pool in self.pools.values())

    @property
    def usd_per_hour(self) -> float | None:
        """None where a GPU's price is not known."""
        prices = [pool.gpu.usd_per_hour for pool in self.pools.values()]
        if any(price is None for price in prices):
            return None
        return sum(pool.workers * (pool.gpu.usd_per_hour or 0.0) for pool in self.pools.values())


def sized(wanted: Wanted, rate: float | None = None) -> Sized:
    """``rate``: instead of the workload's own. Raises StartupError where a model does not fit."""
    plain = _machines(wanted, 1.0)
    drafted = _pace(wanted, plain["decode"])
    machines = _machines(wanted, drafted) if drafted > 1.0 else plain
    of = wanted.workload
    mix = msgspec.structs.replace(of.at(of.mix.rate if rate is None else rate), pace=drafted)
    _check(mix, machines)
    need = needs(mix, machines, wanted.goals, AS_TOLD)
    _check_workers(max(of_role.link_floor for of_role in need.values()))
    pools = {role: _pool(wanted, role, need[role], machines[role]) for role in ROLES}
    alone_s = decode_s(wanted.shape, wanted.rates("decode"), 1, of.context)
    least = service(mix, machines["prefill"]).q90_s, alone_s / drafted
    return Sized(
        pools=pools,
        ceilings=_ceilings(wanted, mix, machines["decode"]),
        pace=drafted,
        predicted=predicted(
            mix,
            machines,
            Pair(prefill=pools["prefill"].workers, decode=pools["decode"].workers),
            AS_TOLD,
        ),
        least_ttft_s=least[0],
        least_tpot_s=least[1],
        infeasible=_infeasible(need),
    )


def _check(mix: Mix, machines: dict[Role, Machine]) -> None:
    """Raises StartupError for a load that no plan is for."""
    decode = machines["decode"]
    held = residents(mix, decode)
    if held.kv_tokens * (1.0 + held.transit) > decode.kv_tokens:
        raise StartupError(
            f"a sequence holds {held.kv_tokens:,.0f} tokens while it decodes, and a decode worker's"
            f" KV pool takes {decode.kv_tokens:,}: use a GPU with more memory, or fp8 KV"
        )
    prompts = mix.rate * service(mix, machines["prefill"]).mean_s
    alone_s = StepModel(*decode.step).decode_s(1, held.kv_tokens)
    sequences = mix.rate * held.output * alone_s / mix.pace / decode.max_batch
    _check_workers(max(prompts, sequences))


def _check_workers(wanted: float) -> None:
    if wanted > MOST_WORKERS:
        raise StartupError(
            f"this load wants {wanted:,.0f} workers and more; plans are for up to"
            f" {MOST_WORKERS:,} of a role"
        )


def _infeasible(need: dict[Role, Need]) -> tuple[Literal["ttft", "tpot"], ...]:
    of: tuple[tuple[Literal["ttft", "tpot"], bool], ...] = (
        ("ttft", need["prefill"].infeasible),
        ("tpot", need["decode"].infeasible),
    )
    return tuple(name for name, missed in of if missed)


def _machines(wanted: Wanted, drafted: float) -> dict[Role, Machine]:
    return {
        role: machine(
            wanted.shape,
            wanted.gpus[role],
            context=wanted.workload.context,
            tpot_s=wanted.goals.tpot_s,
            chunk=wanted.chunk,
            max_batch=wanted.max_batch,
            pace=drafted,
            efficiency=wanted.efficiency,
            link_bytes_s=wanted.link_bytes_s,
        )
        for role in ROLES
    }


def _pool(wanted: Wanted, role: Role, need: Need, of: Machine) -> Pool:
    workers = max(1, need.workers)
    full = workers * (1.0 if role == "prefill" else need.each)
    return Pool(
        role=role,
        gpu=wanted.gpus[role],
        workers=workers,
        need=need,
        machine=of,
        busy=min(1.0, need.load / full),
    )


def _ceilings(wanted: Wanted, mix: Mix, of: Machine) -> Ceilings:
    """Each bound for itself: the policy's own cuts all of them at ``max_batch``."""
    size = batch(mix, of, wanted.goals).size
    held = residents(mix, of)
    by_kv = math.floor(of.kv_tokens / (held.kv_tokens * (1.0 + held.transit)))
    by_tpot = batch_within(
        wanted.shape,
        wanted.rates("decode"),
        wanted.goals.tpot_s * mix.pace,
        wanted.workload.context,
        _MOST,
    )
    bounds: dict[Ceiling, int] = {"tpot": by_tpot, "kv": by_kv, "max_batch": of.max_batch}
    return Ceilings(
        tpot=by_tpot,
        kv=by_kv,
        max_batch=of.max_batch,
        size=size,
        binds=min(bounds, key=lambda name: bounds[name]),
    )


_MOST = 65536


def _pace(wanted: Wanted, plain: Machine) -> float:
    if wanted.drafting is None:
        return 1.0
    context = wanted.workload.context
    most = max(1, min(plain.max_batch, math.floor(plain.kv_tokens / max(1.0, context))))
    at, tpot_s = wanted.rates("decode"), wanted.goals.tpot_s
    return settled_pace(wanted.shape, at, context, tpot_s, most, wanted.drafting)
