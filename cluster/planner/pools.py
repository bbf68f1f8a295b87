"""How many workers of each role: the sizing policy's own arithmetic on machines made up. Pure."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from cluster.planner.gpus import Gpu
from cluster.planner.model_shape import Shape, Work
from cluster.planner.roofline import (
    ASSUMED,
    Drafting,
    Efficiency,
    Rates,
    batch_within,
    decode_s,
    machine,
    rates,
    settled_pace,
)
from cluster.planner.workload import Workload
from cluster.sizing.decision import Need, Predicted
from cluster.sizing.demand import AS_TOLD, batch, needs
from cluster.sizing.moments import residents, service
from cluster.sizing.predict import predicted
from cluster.sizing.snapshot import Goals, Machine, Mix, Pair
from engine.kv_cache.kv_format import Codec
from protocol.errors import StartupError
from protocol.registry.worker_utilisation import Wall, Walls
from protocol.roles import ROLES, Role
from router.placement.step_model import StepModel
from router.walls import techniques
from router.walls.techniques import Technique

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


# MERGED cluster.plan.walls
# Which wall a pool runs into first, and what would relax it. Pure.
#
# compute, bandwidth, capacity and network are those that a live cluster names (router/walls),
# here of
# a worker with as much to do as its objectives allow. ``cost``: the least that can be had is more
# than the load needs, so that its price is what stands in the way.

AnyWall: TypeAlias = Literal[Wall, "cost"]

IDLE = 0.5
"""Below this share of one worker the pool's price binds."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """``why``: for a reader; ``relax``: the best first. ``compute`` and ``bandwidth``: shares of
    the rates that steps reach, of a step with as much in it as is allowed."""

    wall: AnyWall
    why: str
    relax: tuple[Technique, ...]
    compute: float
    bandwidth: float


def bound(wanted: Wanted, of: Sized, pool: Pool) -> Bound:
    figures = _figures(wanted, of, pool)
    wall, why = _prefill(pool, figures) if pool.role == "prefill" else _decode(of, pool, figures)
    if pool.need.link_floor >= pool.workers > 1:
        wall, why = "network", "the links alone want so many workers"
    elif pool.workers == 1 and pool.busy < IDLE:
        wall, why = "cost", f"one worker, {pool.busy:.0%} busy, is the least there is"
    full = pool.role == "decode" and of.ceilings.binds == "max_batch"
    asked = techniques.Pool(pool.role, pool.workers, figures, int(full), of.ceilings.max_batch)
    relax = _cheaper(pool) if wall == "cost" else techniques.techniques(asked, wall)
    if pool.role == "prefill" and wall == "bandwidth":
        relax = [_larger_chunk(figures), *relax]
    return Bound(
        wall=wall,
        why=why,
        relax=tuple(relax),
        compute=figures.compute,
        bandwidth=figures.bandwidth,
    )


def _prefill(pool: Pool, figures: Walls) -> tuple[AnyWall, str]:
    if figures.compute >= figures.bandwidth:
        return "compute", f"FLOPs of a chunk of {pool.machine.chunk} tokens"
    return "bandwidth", f"a chunk of {pool.machine.chunk} tokens is read for longer than computed"


def _decode(of: Sized, pool: Pool, figures: Walls) -> tuple[AnyWall, str]:
    side: AnyWall = "compute" if figures.compute > figures.bandwidth else "bandwidth"
    size = of.ceilings.size
    if of.ceilings.binds == "kv":
        return "capacity", f"the KV pool holds {size} sequences"
    if of.ceilings.binds == "max_batch":
        return side, f"max_batch allows {size} sequences; KV and TPOT would allow more"
    return side, f"a step of {size} sequences takes all that the TPOT objective allows"


def _figures(wanted: Wanted, of: Sized, pool: Pool) -> Walls:
    """As a worker of the pool would report them with as much to do as is allowed."""
    work = _work(wanted, of, pool)
    at = wanted.rates(pool.role)
    seconds = at.seconds(work)
    shape, kv = wanted.shape, wanted.shape.kv
    fp8 = shape.wire_bytes(Codec.FP8)
    return Walls(
        seconds=1.0,
        busy=1.0,
        compute=min(1.0, work.flops / at.flops / seconds),
        bandwidth=min(1.0, work.bytes / at.bytes_s / seconds),
        capacity=1.0 if of.ceilings.binds == "kv" else 0.0,
        network=0.0,
        starved=0.0,
        kv_wait=0.0,
        batch=float(of.ceilings.size) if pool.role == "decode" else 0.0,
        kv_share=work.kv_bytes / work.bytes,
        element_bytes=shape.element_bytes,
        kv_shrink=shape.wire_bytes(Codec.RAW) / fp8 if kv.storage == "wide" else 1.0,
        wire_shrink=shape.wire_bytes(shape.codec) / fp8,
        gpu=True,
        drafts=wanted.drafting is not None,
    )


def _work(wanted: Wanted, of: Sized, pool: Pool) -> Work:
    load = wanted.workload
    if pool.role == "decode":
        return wanted.shape.decode(of.ceilings.size, load.context)
    computed = load.prompt * load.shared
    middle = (computed + load.prompt) / 2
    tokens = min(pool.machine.chunk, load.prompt - computed)
    return wanted.shape.prompt(max(0.0, middle - tokens / 2), tokens)


def _larger_chunk(figures: Walls) -> Technique:
    """Twice as large: weights are read once for both halves."""
    gain = 2.0 / max(1.0, 2.0 * figures.compute)
    return Technique("a larger chunk", gain, "a prompt behind it waits longer")


def _cheaper(pool: Pool) -> list[Technique]:
    gain = 1.0 / max(pool.busy, 0.05)
    return [Technique("a cheaper GPU", gain, "less room for bursts; its objectives may be missed")]
