"""All that a plan says, in one value. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.planner import break_even
from cluster.planner.break_even import Drafts, Split, Wire
from cluster.planner.pools import Bound, Sized, Wanted, bound, sized
from engine.kv_cache.kv_format import Codec
from protocol.roles import ROLES, Role

# MERGED cluster.plan.cost
# What tokens cost. Pure.

_MILLIONS_AN_HOUR = 3600.0 / 1e6


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """In USD: an hour of all GPUs, and a million tokens. Prompts pay for the prefill pool, cached
    tokens as much as others; answers for the decode pool; ``blended`` is of both together."""

    hour: float
    prompt_tokens: float
    output_tokens: float
    blended: float


def cost(wanted: Wanted, of: Sized) -> Cost | None:
    """None where a GPU's price is not known."""
    hour = of.usd_per_hour
    if hour is None:
        return None
    load = wanted.workload
    prompts = load.mix.rate * load.prompt * _MILLIONS_AN_HOUR
    outputs = load.mix.rate * load.output * _MILLIONS_AN_HOUR
    each = {role: pool.workers * (pool.gpu.usd_per_hour or 0.0) for role, pool in of.pools.items()}
    return Cost(
        hour=hour,
        prompt_tokens=each["prefill"] / prompts,
        output_tokens=each["decode"] / outputs,
        blended=hour / (prompts + outputs),
    )


class Kv(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a token in the pool, and if it were exact or fp8; tokens that a worker's pool holds,
    and sequences of the mean length while they decode."""

    precision: str
    token_bytes: float
    exact_bytes: float
    fp8_bytes: float
    pool_tokens: dict[Role, int]
    context: float
    sequences: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``wanted``: what it is for."""

    wanted: Wanted
    sized: Sized
    walls: dict[Role, Bound]
    kv: Kv
    drafts: list[Drafts]
    wire: Wire
    split: Split
    cost: Cost | None


def plan(wanted: Wanted) -> Plan:
    """Raises StartupError for a model that does not fit a GPU."""
    of = sized(wanted)
    return Plan(
        wanted=wanted,
        sized=of,
        walls={role: bound(wanted, of, of.pools[role]) for role in ROLES},
        kv=_kv(wanted, of),
        drafts=break_even.drafts(wanted, of),
        wire=break_even.wire(wanted, of),
        split=break_even.split(wanted, of),
        cost=cost(wanted, of),
    )


def _kv(wanted: Wanted, of: Sized) -> Kv:
    shape = wanted.shape
    return Kv(
        precision=shape.kv.precision,
        token_bytes=shape.kv_bytes,
        exact_bytes=shape.wire_bytes(Codec.RAW),
        fp8_bytes=shape.wire_bytes(Codec.FP8),
        pool_tokens={role: of.pools[role].machine.kv_tokens for role in ROLES},
        context=wanted.workload.context,
        sequences=of.ceilings.kv,
    )


def as_json(of: Plan) -> dict[str, Any]:
    """For programs: all figures, without the samples of the workload."""
    load = of.wanted.workload
    found: dict[str, Any] = msgspec.to_builtins(of)
    found["wanted"]["workload"] = {
        "told": load.told,
        "rate": load.mix.rate,
        "prompt_tokens": load.prompt,
        "shared": load.shared,
        "output_tokens": load.output,
        "kept_tokens": load.kept_tokens,
        "kept_bytes": load.kept_tokens * of.kv.token_bytes,
    }
    found["wanted"]["shape"].pop("cost")
    found["workers"] = {role: of.sized.pools[role].workers for role in ROLES}
    found["slo_infeasible"] = list(of.sized.infeasible)
    found["split"]["pays_at_tpot_s"] = of.split.pays
    return found
