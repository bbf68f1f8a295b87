"""Memory: what all processes would take, beside what is free."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil

from cluster import drafting
from cluster.doctor import fitting, gpus, model
from cluster.doctor.finding import Finding, ok, problem
from cluster.doctor.fitting import Engines, Plan
from cluster.doctor.gpus import Gpu, Gpus
from cluster.doctor.wanted import Wanted
from cluster.report import size
from engine.sizing import Device, footprint
from engine.spec import EngineSpec
from protocol.errors import StartupError

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
        part = fitting.share(facts.engines, index, len(facts.gpus))
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
            remedy = fitting.ways(plan, FRONT_BYTES, cluster=wanted.what == "cluster")
            findings.append(problem(plan.place, text, remedy))
    return findings
