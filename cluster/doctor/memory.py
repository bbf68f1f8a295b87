"""Memory: what all processes would take, beside what is free."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil

from cluster.doctor import gpus, model
from cluster.doctor.finding import Finding, ok, problem
from cluster.doctor.gpus import Gpu, Gpus
from cluster.doctor.subject import Wanted
from cluster.local.start_report import size
from cluster.models import drafting
from engine.execution.memory_footprint import Device, Footprint, footprint
from engine.ipc.spec import EngineSpec
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.roles import Role

# MERGED cluster.doctor.fitting
# Whether engines fit where they are to go, and what would. Pure.

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


FRONT_BYTES = 105 << 20  # a worker's front, or a router; measured
CLUSTER_BYTES = 640 << 20  # Ray, Serve, router, Redis; measured
_GPU_HOST_BYTES = 2 << 30  # of the machine's memory, for an engine on a GPU; not measured


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the machine, or of the container where that has less. ``engines``: of each pool,
    none while the model is not known; ``error``: why sizes make no engine."""

    total: int
    free: int
    gpus: tuple[Gpu, ...] = ()
    engines: tuple[Engines, ...] = ()
    error: str = ""


def collect(wanted: Wanted) -> Memory:
    total, free = _host()
    found = model.here(wanted) if wanted.pools else None
    cards = gpus.collect(wanted)
    device: Device = "cuda" if _on_gpu(cards, wanted) else "cpu"
    used = cards.gpus[: cards.visible] if device == "cuda" else ()
    engines: tuple[Engines, ...] = ()
    error = ""
    if found is not None and found.config is not None and not found.problems:
        try:
            engines = tuple(
                Engines(p.role, p.workers, footprint(e, found.config, found.shards, device))
                for p in wanted.pools
                for e in [_with_draft(p.engine, wanted.model)]
            )
        except StartupError as e:
            error = str(e)
    return Memory(total=total, free=free, gpus=used, engines=engines, error=error)


def _with_draft(engine: EngineSpec, served: str | None) -> EngineSpec:
    """With the folder of its draft; without one that is not here, or not at all."""
    try:
        spec, repo = drafting.located(engine.speculation, served)
    except StartupError:
        return engine
    return engine if repo is not None else msgspec.structs.replace(engine, speculation=spec)


def _on_gpu(cards: Gpus, wanted: Wanted) -> bool:
    return bool(cards.gpus) and cards.visible > 0 and (wanted.device or "cuda").startswith("cuda")


def _host() -> tuple[int, int]:
    """(total, free) of the machine, or of the cgroup where that has less. Cache counts as free."""
    memory = psutil.virtual_memory()
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = limit - used + int(stat["inactive_file"])
        return min(memory.total, limit), min(memory.available, left)
    except (OSError, ValueError, KeyError):  # no cgroup, or "max"
        return memory.total, memory.available


def plans(facts: Memory | None, wanted: Wanted) -> list[Plan]:
    """The machine first, then each GPU that engines go to; nothing while the model is not known."""
    if facts is None or not facts.engines:
        return []
    others = wanted.workers * FRONT_BYTES + (CLUSTER_BYTES if wanted.what == "cluster" else 0)
    if facts.engines[0].each.device == "cpu":
        return [Plan("memory", facts.free, facts.engines, others)]
    host = Plan("memory", facts.free, (), others + wanted.workers * _GPU_HOST_BYTES)
    cards = []
    for index, gpu in enumerate(facts.gpus):
        part = share(facts.engines, index, len(facts.gpus))
        cards += [Plan(f"gpu {gpu.index}", gpu.free, part, 0)] if part else []
    return [host, *cards]


def judge(facts: Memory, wanted: Wanted) -> list[Finding]:
    if facts.error:
        return [problem("memory", facts.error, "give more --kv-tokens, or leave it out")]
    if not facts.engines:
        return [ok("memory", f"{size(facts.free)} of {size(facts.total)} free")]
    findings = []
    for plan in plans(facts, wanted):
        text = f"{size(plan.needed)} needed, {size(plan.free)} free"
        if plan.fits:
            findings.append(ok(plan.place, text))
        else:
            remedy = ways(plan, FRONT_BYTES, cluster=wanted.what == "cluster")
            findings.append(problem(plan.place, text, remedy))
    return findings
