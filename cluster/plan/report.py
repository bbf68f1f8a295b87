"""All that a plan says, in one value. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.plan import breaks
from cluster.plan.breaks import Drafts, Split, Wire
from cluster.plan.cost import Cost, cost
from cluster.plan.pools import Sized, Wanted, sized
from cluster.plan.walls import Bound, bound
from engine.kv_format import Codec
from protocol.roles import ROLES, Role


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
        drafts=breaks.drafts(wanted, of),
        wire=breaks.wire(wanted, of),
        split=breaks.split(wanted, of),
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
