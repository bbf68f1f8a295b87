"""Whether engines fit where they are to go, and what would. Pure."""

from __future__ import annotations

import msgspec

from cluster.report import size
from engine.sizing import Footprint
from protocol.blocks import BLOCK_TOKENS
from protocol.roles import Role

_SPARE = 0.95  # of what is free; the rest is the system's
_FEW_PAGES = 8  # less is not worth proposing


class Engines(msgspec.Struct, frozen=True):
    """Engines of one pool."""

    role: Role
    count: int
    each: Footprint

    @property
    def total(self) -> int:
        return self.count * self.each.total


class Plan(msgspec.Struct, frozen=True):
    """Who takes the memory of one place, the machine or a GPU, in bytes."""

    place: str
    free: int
    engines: tuple[Engines, ...]
    others: int  # everything but engines

    @property
    def needed(self) -> int:
        return sum(pool.total for pool in self.engines) + self.others

    @property
    def fits(self) -> bool:
        return self.needed <= self.room

    @property
    def room(self) -> int:
        return int(self.free * _SPARE)


def share(engines: tuple[Engines, ...], index: int, places: int) -> tuple[Engines, ...]:
    """Of engines that are dealt out over ``places``, those of place ``index``."""
    dealt = [pool for pool in engines for _ in range(pool.count)][index::places]
    mine = [msgspec.structs.replace(p, count=sum(q is p for q in dealt)) for p in engines]
    return tuple(pool for pool in mine if pool.count)


def ways(plan: Plan, front_bytes: int, *, cluster: bool) -> str:
    """Flags that would make it fit, the least painful first. ``front_bytes``: what goes with each
    engine that is left out."""
    found = []
    if tokens := kv_tokens_that_fit(plan):
        found.append(f"--kv-tokens {tokens}")
    if cluster and (fewer := _fewer_workers(plan, front_bytes)):
        found.append(fewer)
    if all(pool.each.dtype == "float32" for pool in plan.engines):
        half = _in_bfloat16(plan)
        tokens = kv_tokens_that_fit(half)
        if half.fits or tokens:
            found.append("--dtype bfloat16" + ("" if half.fits else f" --kv-tokens {tokens}"))
    if not found and cluster:
        found += filter(None, [_smallest(plan, front_bytes)])
    missing = size(plan.needed - plan.room)
    return " or ".join(found) or f"free {missing} more, or take a smaller model"


def kv_tokens_that_fit(plan: Plan) -> int:
    """Tokens of KV that every engine can have, in whole pages; 0 when they are too few."""
    per_token = sum(pool.count * pool.each.kv_bytes_per_token for pool in plan.engines)
    if not per_token or any(pool.each.kv_grows for pool in plan.engines):
        return 0
    fixed = sum(pool.count * pool.each.fixed for pool in plan.engines)
    pages = (plan.room - plan.others - fixed) // (per_token * BLOCK_TOKENS)
    return pages * BLOCK_TOKENS if pages >= _FEW_PAGES else 0


def _fewer_workers(plan: Plan, front_bytes: int) -> str:
    """Flags for the largest part of the pools that fits: one worker less at a time, of the larger
    pool first; the last one decodes."""
    counts = {pool.role: pool.count for pool in plan.engines}
    size_of = {pool.role: pool.each.total + front_bytes for pool in plan.engines}
    needed = plan.needed
    while needed > plan.room:
        role: Role = "prefill" if counts.get("prefill", 0) >= counts.get("decode", 0) else "decode"
        if role not in size_of or counts[role] <= (0 if role == "prefill" else 1):
            return ""
        counts[role] -= 1
        needed -= size_of[role]
    return f"--prefill {counts.get('prefill', 0)} --decode {counts.get('decode', 0)}"


def _smallest(plan: Plan, front_bytes: int) -> str:
    """Flags for one engine of each pool, with as much KV as fits and was asked for."""
    pools = tuple(msgspec.structs.replace(pool, count=1) for pool in plan.engines)
    gone = sum(pool.count - 1 for pool in plan.engines)
    small = Plan(plan.place, plan.free, pools, plan.others - gone * front_bytes)
    asked = (p.each.kv // p.each.kv_bytes_per_token for p in pools if p.each.kv_bytes_per_token)
    tokens = min([kv_tokens_that_fit(small), *asked])
    workers = " ".join(f"--{pool.role} 1" for pool in pools)
    return f"{workers} --kv-tokens {tokens}" if tokens else ""


def _in_bfloat16(plan: Plan) -> Plan:
    """Weights and KV take half."""
    pools = []
    for pool in plan.engines:
        each = msgspec.structs.replace(
            pool.each,
            dtype="bfloat16",
            weights=pool.each.weights // 2,
            kv=pool.each.kv // 2,
            kv_bytes_per_token=pool.each.kv_bytes_per_token // 2,
        )
        pools.append(msgspec.structs.replace(pool, each=each))
    return msgspec.structs.replace(plan, engines=tuple(pools))
