"""The autoscaler of a simulation: observed traffic, the product's policy, and its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cluster.autoscale.start_times import StartTimeEstimate
from cluster.config.schema import AutoscalerSection
from cluster.observation.reading import ClusterReading
from cluster.observation.request_mix import RequestCounter
from cluster.observation.sliding_window import BURST_INTERVALS, SlidingWindow
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.fleet import SimulatedFleet
from cluster.simulator.devices.worker import SimulatedWorker
from cluster.simulator.scenario import Scenario
from cluster.sizing.decision import DecisionRecord, ScalingDecision
from cluster.sizing.snapshot import (
    MachineModel,
    SizingMemory,
    SizingSnapshot,
    WorkerCounts,
    WorkerPhase,
    WorkerSnapshot,
)
from protocol.roles import ROLES, Role


def simulated_settings(scenario: Scenario) -> AutoscalerSettings:
    """Return the settings that an autoscaler of the product would have."""
    shared = set(AutoscalerSection.model_fields) - {"prometheus_url"}
    return AutoscalerSettings(
        cluster="simulated",
        redis_url="",
        token="",
        model_id="",
        prometheus_url=None,
        tls=None,
        ttft_slo_s=scenario.goals.ttft_s,
        tpot_slo_s=scenario.goals.tpot_s,
        **scenario.autoscaler.model_dump(include=shared),
    )


class SimulatedAutoscaler:
    """Runs one turn each ``interval_s``; ``Simulation`` creates it.

    ``blind``: metrics are missing; what is counted meanwhile comes as one interval afterwards, as
    from routers' pages (``cluster/observation/router_pages.py``). ``records``: all decisions, if
    ``keep``. ``reasons``: decisions by their reason.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        scenario: Scenario,
        machines: dict[Role, MachineModel],
        fleet: SimulatedFleet,
        counter: RequestCounter,
        policy: Callable[[SizingSnapshot], ScalingDecision],
        *,
        keep: bool,
    ) -> None:
        self.settings = settings = simulated_settings(scenario)
        self.blind = False
        self.records: list[DecisionRecord] = []
        self.reasons: Counter[str] = Counter()
        self._starts = StartTimeEstimate(settings.start_s)
        self._machines = machines
        self._gpus = scenario.machines.gpus
        self._acts = settings.mode == "act"
        self._keep = keep
        self._clock = clock
        self._fleet = fleet
        self._counter = counter
        self._uncounted_s = 0.0  # since the window last got the counts
        self._policy = policy
        self._window = SlidingWindow(settings.window_s, BURST_INTERVALS * settings.interval_s)
        self._memory = SizingMemory()
        self._targets = WorkerCounts(**{role: fleet.count(role) for role in ROLES})
        self._seen: dict[str, tuple[float, int]] = {}  # by worker, at the last turn

    def turn(self) -> None:
        """Observe, decide and act once; schedule the next turn."""
        self._clock.at(self._clock.now + self.settings.interval_s, self.turn)
        self._uncounted_s += self.settings.interval_s
        if not self.blind:
            self._count_growth()
            self._window.add(self._counter.take(self._uncounted_s))
            self._uncounted_s = 0.0
        snapshot = self._snapshot()
        decision = self._policy(snapshot)
        self._memory = decision.memory
        self.reasons[decision.reason] += 1
        if self._keep:
            self._record(snapshot, decision)
        if self._acts:
            self._act(decision)

    def _count_growth(self) -> None:
        """Count what the outputs that have not ended have grown by since the last turn."""
        for worker in self._fleet.workers:
            for request, given in worker.batch.given(self._clock.now):
                tokens = min(request.output, request.emitted + 1 + given)
                if tokens > request.counted:
                    self._counter.grew(request.counted, tokens)
                    request.counted = tokens

    def _snapshot(self) -> SizingSnapshot:
        backlog = sum(w.uncomputed_tokens for w in self._fleet.workers)
        backlog += sum(r.queue.prompt_tokens for r in self._fleet.routers)
        decoding = sum(w.batch.rows for w in self._fleet.workers if w.role == "decode")
        mix = self._window.mix(backlog_tokens=float(backlog), residents=float(decoding))
        reading = ClusterReading(
            at_s=self._clock.now,
            mix=None if self.blind else mix,
            observed=self._window.observed(),
            workers=tuple(self._worker(w) for w in self._fleet.workers),
            machines=self._machines,
        )
        self._starts.observe(reading.workers, reading.at_s)
        return reading.snapshot(
            goals=self.settings.goals,
            targets=self._targets,
            limits=self.settings.limits,
            tuning=self.settings.tuning(self._starts.seconds),
            memory=self._memory,
        )

    def _worker(self, worker: SimulatedWorker) -> WorkerSnapshot:
        """Return the worker as the policy sees it; the first workers count as warm."""
        assert worker.state != "gone"
        state: WorkerPhase = worker.state
        young = worker.since_s > 0 and self._clock.now - worker.since_s < self.settings.warm_up_s
        if state == "serving" and young:
            state = "warming"
        busy_s, tokens = self._computed(worker)
        return WorkerSnapshot(
            instance=worker.name,
            home=worker.home,
            role=worker.next_role if state == "changing" else worker.role,
            state=state,
            kv_tokens=worker.pool.used_tokens,
            gpus=self._gpus[worker.home],
            busy=busy_s / self.settings.interval_s,
            prompt_tokens_s=tokens / self.settings.interval_s,
        )

    def _computed(self, worker: SimulatedWorker) -> tuple[float, int]:
        """Return the seconds of the prefill steps that began since the last turn, and their
        tokens."""
        (busy_s, tokens), now = self._seen.get(worker.name, (0.0, 0)), worker.computed_prompts
        self._seen[worker.name] = now
        return now[0] - busy_s, now[1] - tokens

    def _record(self, snapshot: SizingSnapshot, decision: ScalingDecision) -> None:
        self.records.append(
            DecisionRecord(
                run="simulated",
                number=len(self.records) + 1,
                time_s=self._clock.now,
                acted=self._acts,
                snapshot=snapshot,
                decision=decision,
            )
        )

    def _act(self, decision: ScalingDecision) -> None:
        """Carry out loans first, then numbers of workers, as ``cluster/autoscale`` does."""
        for loan in decision.loans:
            worker = self._fleet.named(loan.instance)
            if worker is not None:
                self._fleet.lend(worker, loan.role, self.settings.loan_drain_s)
        if decision.targets != self._targets:
            self._starts.record_request(self._targets, decision.targets, self._clock.now)
            self._targets = decision.targets
            self._fleet.scale(decision.targets)
