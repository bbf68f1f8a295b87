"""A world without processes for the loop: it remembers what it was asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.settings import autoscaler_settings
from cluster.autoscale.decision_log import DecisionLog
from cluster.autoscale.loop import AutoscalerLoop, AutoscalerTurn, LoopDependencies, ScalingPolicy
from cluster.observation.reading import ClusterReading
from cluster.sizing.decision import DecisionRecord, Loan, decode_record
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import RequestMix, WorkerCounts, WorkerSnapshot
from protocol.errors import Unavailable
from tests.cluster.sizing.worlds import MACHINE, workers

SETTINGS = autoscaler_settings(
    cluster="c",
    redis_url="",
    token="t",
    mode="act",
    interval_s=0.5,
    ttft_slo_s=1.0,
    tpot_slo_s=0.05,
)


class Seen:
    """The source: what is set here. ``error``: a bug in it."""

    def __init__(self, prefill: int, decode: int, load: RequestMix | None) -> None:
        self.workers: tuple[WorkerSnapshot, ...] = workers(prefill, decode)
        self.load = load
        self.error: Exception | None = None

    async def read(self) -> ClusterReading:
        if self.error is not None:
            raise self.error
        return ClusterReading(
            at_s=time.monotonic(),
            mix=self.load,
            workers=self.workers,
            machines={"prefill": MACHINE, "decode": MACHINE},
            age_s=0.1,
        )


class Asked:
    """Numbers of workers. ``away``: nobody answers."""

    changes = True

    def __init__(self, prefill: int, decode: int) -> None:
        self.now = WorkerCounts(prefill=prefill, decode=decode)
        self.asked: list[WorkerCounts] = []
        self.away = False

    async def targets(self, workers: Sequence[WorkerSnapshot]) -> WorkerCounts:
        if self.away:
            raise Unavailable("nobody answers")
        return self.now

    async def ask(self, before: WorkerCounts, after: WorkerCounts) -> None:
        if self.away:
            raise Unavailable("nobody answers")
        self.now = after
        self.asked.append(after)


class Lent:
    """Loans. ``why``: why all of them fail."""

    def __init__(self) -> None:
        self.lent: list[Loan] = []
        self.why = ""

    async def lend(self, loan: Loan) -> str:
        self.lent.append(loan)
        return self.why


class Held:
    """The lease. ``held``: None where Redis does not answer."""

    def __init__(self) -> None:
        self.held: bool | None = True

    async def take(self) -> bool:
        if self.held is None:
            raise Unavailable("Redis does not say")
        return self.held


class Scaled:
    """A loop over all of these, and its log."""

    def __init__(
        self, folder: Path, load: RequestMix | None, policy: ScalingPolicy = decide, **changes: Any
    ):
        from msgspec.structs import replace

        self.settings = replace(SETTINGS, **changes)
        self.seen, self.asked, self.loans, self.lease = (
            Seen(1, 1, load),
            Asked(1, 1),
            Lent(),
            Held(),
        )
        self.log = DecisionLog(folder / "decisions.jsonl", "c")
        self.log.open()
        self.turns: list[AutoscalerTurn] = []
        acts = self.settings.mode == "act"
        lease: Any = self.lease if acts else None
        world = LoopDependencies(self.seen, self.asked, self.loans, lease)
        self.loop = AutoscalerLoop(self.settings, world, self.log, policy, self.turns.append)

    def records(self) -> list[DecisionRecord]:
        return [decode_record(line) for line in self.log.path.read_bytes().splitlines()]
