"""Checks that all processes fit into the free memory, and finds flags that make them fit.

The plans are also printed at every start (``prepare``).
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

import msgspec
import psutil

from cluster.doctor import gpus, model
from cluster.doctor.finding import Finding, ok, problem
from cluster.doctor.gpus import GpuDevice, GpuFacts
from cluster.doctor.subject import DoctorSubject
from cluster.local.start_report import format_size
from cluster.models import drafting
from engine.ipc.settings import DeviceKind, EngineSettings
from engine.memory.memory_footprint import Footprint, GpuMemory, estimate_footprint
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.roles import Role

_USABLE_SHARE = 0.95  # of the free memory; the rest is left to the system
_MIN_PAGES = 8  # fewer are not worth proposing
_MOSTLY_FREE = 0.8  # of a GPU: less means that others use it
FRONT_BYTES = 105 << 20  # a worker's front, or a router; measured
CLUSTER_BYTES = 640 << 20  # Ray, Serve, router, Redis; measured
_GPU_HOST_BYTES = 2 << 30  # host memory of an engine on a GPU; not measured


class PoolEngines(msgspec.Struct, frozen=True):
    """The engines of one pool on one place, with the memory of each."""

    role: Role
    count: int
    each: Footprint

    @property
    def total(self) -> int:
        return self.count * self.each.total


class MemoryPlan(msgspec.Struct, frozen=True):
    """The memory that one place, the machine or a GPU, has and needs, in bytes."""

    place: str
    free: int
    engines: tuple[PoolEngines, ...]
    others: int  # all processes except engines
    gpu: GpuMemory | None = None  # as each of the engines counts it; None: the machine

    @property
    def needed(self) -> int:
        return sum(pool.total for pool in self.engines) + self.others

    @property
    def fits(self) -> bool:
        return self.needed <= self.room and not self.beyond_share

    @property
    def room(self) -> int:
        if self.gpu is None:
            return usable_bytes(self.free)
        return self.free - sum(pool.count for pool in self.engines) * self.gpu.reserve

    @property
    def beyond_share(self) -> int:
        """Bytes by which the largest engine exceeds what it may take of its GPU; 0: none does."""
        if self.gpu is None:
            return 0
        return max(0, *(pool.each.total - self.gpu.allowed for pool in self.engines))


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes: of the machine, or of the container if that has less.

    ``engines``: per pool; empty while the model is not known. ``error``: why the configured sizes
    are invalid."""

    total: int
    free: int
    gpus: tuple[GpuDevice, ...] = ()  # that engines use
    engines: tuple[PoolEngines, ...] = ()
    error: str = ""


def collect(subject: DoctorSubject) -> MemoryFacts:
    total, free = _host()
    found = model.local_model_facts(subject) if subject.pools else None
    cards = gpus.collect(subject)
    device: DeviceKind = "cuda" if _on_gpu(cards, subject) else "cpu"
    used = cards.engine_gpus(subject.device) if device == "cuda" else ()
    engines: tuple[PoolEngines, ...] = ()
    error = ""
    if found is not None and found.config is not None and not found.problems:
        try:
            engines = tuple(
                PoolEngines(
                    p.role, p.workers, estimate_footprint(e, found.config, found.shards, device)
                )
                for p in subject.pools
                for e in [_with_draft(p.engine, subject.model)]
            )
        except StartupError as e:
            error = str(e)
    return MemoryFacts(total=total, free=free, gpus=used, engines=engines, error=error)


def judge(facts: MemoryFacts, subject: DoctorSubject) -> list[Finding]:
    if facts.error:
        return [problem("memory", facts.error, "raise --kv-tokens, or leave it out")]
    if not facts.engines:
        return [ok("memory", f"{format_size(facts.free)} of {format_size(facts.total)} free")]
    findings = []
    for plan in memory_plans(facts, subject):
        text = f"{format_size(plan.needed)} needed, {format_size(plan.free)} free"
        if plan.fits:
            findings.append(ok(plan.place, text))
        elif plan.gpu is not None:
            findings.append(problem(plan.place, f"{text}{_share_text(plan)}", gpu_remedy(plan)))
        else:
            remedy = remedy_flags(plan, FRONT_BYTES, cluster=subject.kind == "cluster")
            findings.append(problem(plan.place, text, remedy))
    return findings


def memory_plans(facts: MemoryFacts | None, subject: DoctorSubject) -> list[MemoryPlan]:
    """Return the plan of the machine, then of each GPU with engines.

    The list is empty while the model is not known."""
    if facts is None or not facts.engines:
        return []
    others = subject.workers * FRONT_BYTES + (CLUSTER_BYTES if subject.kind == "cluster" else 0)
    if facts.engines[0].each.device == "cpu":
        return [MemoryPlan("memory", facts.free, facts.engines, others)]
    others += subject.workers * _GPU_HOST_BYTES
    others += sum(pool.count * pool.each.pinned for pool in facts.engines)
    host = MemoryPlan("memory", facts.free, (), others)
    cards, share = [], subject.gpu_share(len(facts.gpus))
    for index, gpu in enumerate(facts.gpus):
        part = engines_of_place(facts.engines, index, len(facts.gpus))
        memory = GpuMemory(total=gpu.total, free=gpu.free, share=share)
        cards += [MemoryPlan(f"gpu {gpu.index}", gpu.free, part, 0, memory)] if part else []
    return [host, *cards]


def usable_bytes(free: int) -> int:
    """Return the part of the machine's free memory that processes may take."""
    return int(free * _USABLE_SHARE)


def host_bytes(engine: Footprint | None) -> int:
    """Return the memory of the machine that one more worker takes; None: one more router."""
    if engine is None:
        return FRONT_BYTES
    if engine.device == "cpu":
        return FRONT_BYTES + engine.total
    return FRONT_BYTES + _GPU_HOST_BYTES + engine.pinned


def engines_of_place(
    engines: tuple[PoolEngines, ...], index: int, places: int
) -> tuple[PoolEngines, ...]:
    """Return the engines of place ``index`` when engines are dealt out over all ``places``."""
    dealt = [pool for pool in engines for _ in range(pool.count)][index::places]
    mine = [msgspec.structs.replace(p, count=sum(q is p for q in dealt)) for p in engines]
    return tuple(pool for pool in mine if pool.count)


def _with_draft(engine: EngineSettings, served: str | None) -> EngineSettings:
    """Return the settings with the folder of the draft, unless it must still be downloaded."""
    try:
        spec, repo = drafting.locate_draft(engine.speculation, served)
    except StartupError:
        return engine
    return engine if repo is not None else msgspec.structs.replace(engine, speculation=spec)


def _on_gpu(cards: GpuFacts, subject: DoctorSubject) -> bool:
    return bool(cards.gpus) and cards.visible > 0 and (subject.device or "cuda").startswith("cuda")


def _host() -> tuple[int, int]:
    """Return (total, free) bytes of the machine, or of the cgroup if less; caches are free."""
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


def remedy_flags(plan: MemoryPlan, front_bytes: int, *, cluster: bool) -> str:
    """Return flags that would make the plan fit, the least costly first.

    ``front_bytes``: memory that is saved beside each engine that is left out."""
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
    missing = format_size(plan.needed - plan.room)
    return " or ".join(found) or f"free {missing} more, or use a smaller model"


def _share_text(plan: MemoryPlan) -> str:
    """Say which engine exceeds its share of a GPU; empty if none does."""
    if plan.gpu is None or not plan.beyond_share:
        return ""
    largest = max(pool.each.total for pool in plan.engines)
    return (
        f"; an engine needs {format_size(largest)}, and may take {format_size(plan.gpu.allowed)}"
        f" ({plan.gpu.share:.0%} of {format_size(plan.gpu.total)}, less a reserve)"
    )


def gpu_remedy(plan: MemoryPlan) -> str:
    """Return what would make the engines fit on their GPU."""
    assert plan.gpu is not None
    found = []
    if tokens := context_that_fits(plan):
        grows = any(pool.each.kv_grows for pool in plan.engines)
        found.append(f"--max-model-len {tokens}" if grows else f"--kv-tokens {tokens}")
    if sum(pool.count for pool in plan.engines) > 1:
        found.append("start fewer workers on each GPU")
    found.append("smaller --max-batch and --prefill-chunk")
    if plan.free < _MOSTLY_FREE * plan.gpu.total:
        found.append("stop other processes on the GPU (`nvidia-smi` lists them)")
    return " or ".join(found) + ", or use a smaller model"


def context_that_fits(plan: MemoryPlan) -> int:
    """Return the KV tokens, or the longest context, that every engine on a GPU has memory for, in
    whole pages; 0 when they are too few."""
    assert plan.gpu is not None
    gpu, room = plan.gpu, plan.room
    each = [pool.each for pool in plan.engines for _ in range(pool.count)]

    def is_too_much(pages: int) -> bool:
        sizes = [engine.with_pool(pages * BLOCK_TOKENS).total for engine in each]
        return max(sizes) > gpu.allowed or sum(sizes) > room

    most = room // (min(engine.kv_bytes_per_token for engine in each) * BLOCK_TOKENS)
    pages = bisect_left(range(1, most + 1), True, key=is_too_much)
    return pages * BLOCK_TOKENS if pages >= _MIN_PAGES else 0


def kv_tokens_that_fit(plan: MemoryPlan) -> int:
    """Return the KV tokens that fit for every engine, in whole pages; 0 when they are too few."""
    per_token = sum(pool.count * pool.each.kv_bytes_per_token for pool in plan.engines)
    if not per_token or any(pool.each.kv_grows for pool in plan.engines):
        return 0
    fixed = sum(pool.count * pool.each.fixed for pool in plan.engines)
    pages = (plan.room - plan.others - fixed) // (per_token * BLOCK_TOKENS)
    return pages * BLOCK_TOKENS if pages >= _MIN_PAGES else 0


def _fewer_workers(plan: MemoryPlan, front_bytes: int) -> str:
    """Return flags for the largest pools that fit.

    Workers are removed one at a time, from the larger pool first; one decode worker is kept."""
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


def _smallest(plan: MemoryPlan, front_bytes: int) -> str:
    """Return flags for one engine per pool, with the KV that fits, at most the configured KV."""
    pools = tuple(msgspec.structs.replace(pool, count=1) for pool in plan.engines)
    gone = sum(pool.count - 1 for pool in plan.engines)
    small = MemoryPlan(plan.place, plan.free, pools, plan.others - gone * front_bytes)
    asked = (p.each.kv // p.each.kv_bytes_per_token for p in pools if p.each.kv_bytes_per_token)
    tokens = min([kv_tokens_that_fit(small), *asked])
    workers = " ".join(f"--{pool.role} 1" for pool in pools)
    return f"{workers} --kv-tokens {tokens}" if tokens else ""


def _in_bfloat16(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with weights and KV in bfloat16, half the size of float32."""
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
