"""Snapshots to decide on, and a world that does at once what it is told."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cluster.sizing.decision import ScalingDecision
from cluster.sizing.snapshot import (
    Arrivals,
    MachineModel,
    PoolLimits,
    RequestMix,
    RequestSample,
    SizingMemory,
    SizingSnapshot,
    SloTargets,
    WorkerCounts,
    WorkerSnapshot,
)
from protocol.roles import Role

MACHINE = MachineModel(
    step=(0.01, 0.0001, 1e-8, 1e-4, 0.0), chunk=512, max_batch=64, kv_tokens=100_000, kv_bytes=1e5
)
GOALS = SloTargets(ttft_s=1.0, tpot_s=0.05)
LIMITS = PoolLimits(
    least=WorkerCounts(prefill=1, decode=1), most=WorkerCounts(prefill=50, decode=50)
)


def mix(rate: float, uncached: float = 1000, output: float = 200, **changes: Any) -> RequestMix:
    return replace(
        RequestMix(
            rate=rate,
            window_s=60.0,
            samples=(RequestSample(uncached, 0.0, output),),
            arrivals=Arrivals(5.0, (5.0 * rate,) * 60),
        ),
        **changes,
    )


def workers(prefill: int, decode: int) -> tuple[WorkerSnapshot, ...]:
    of: tuple[tuple[Role, int], ...] = (("prefill", prefill), ("decode", decode))
    return tuple(
        WorkerSnapshot(instance=f"{role[0]}{n}", home=role, role=role, kv_tokens=n)
        for role, count in of
        for n in range(count)
    )


def snapshot(prefill: int, decode: int, load: RequestMix | None, **changes: Any) -> SizingSnapshot:
    made = SizingSnapshot(
        at_s=1000.0,
        mix=load,
        goals=GOALS,
        machines={"prefill": MACHINE, "decode": MACHINE},
        workers=workers(prefill, decode),
        targets=WorkerCounts(prefill=prefill, decode=decode),
        limits=LIMITS,
    )
    return replace(made, **changes)


def after(
    before: SizingSnapshot, decision: ScalingDecision, seconds: float, **changes: Any
) -> SizingSnapshot:
    """What is there ``seconds`` later, when all of it was done at once. Of a pool that shrinks, the
    worker with the last name goes."""
    roles = {loan.instance: loan.role for loan in decision.loans}
    there = [replace(w, role=roles.get(w.instance, w.role)) for w in before.workers]
    for home in ("prefill", "decode"):
        of = [w for w in there if w.home == home]
        wanted = decision.targets.of(home)
        for worker in of[wanted:]:
            there.remove(worker)
        names = (f"{home[0]}{before.at_s:.0f}-{n}" for n in range(wanted - len(of)))
        there += [WorkerSnapshot(instance=name, home=home, role=home) for name in names]
    made = replace(
        before,
        at_s=before.at_s + seconds,
        workers=tuple(there),
        targets=decision.targets,
        memory=decision.memory,
    )
    return replace(made, **changes)


def roles(of: SizingSnapshot) -> tuple[int, int]:
    """Workers of each role."""
    prefill = sum(w.role == "prefill" for w in of.workers)
    return prefill, len(of.workers) - prefill


EMPTY = SizingMemory()
