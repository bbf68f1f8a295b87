"""Runs the steps of one engine for the server, counts them, and reports the load with each beat."""

from __future__ import annotations

from collections.abc import Callable

from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.ipc import messages as m
from engine.ipc.counters import EngineCounters, SpeculationStatus
from engine.scheduling.sequence import Phase
from engine.scheduling.step_policy import StepPlan
from engine.scheduling.step_time import MIN_STEP_S

PACE_DECAY = 0.9
"""Weight of earlier beats in the pace at each beat: about the last five seconds count."""


class DecodePace:
    """The mean number of tokens that a sequence gets in the time of a plain step, over the last
    beats. It is 1 without speculation."""

    def __init__(self) -> None:
        self._tokens = self._plain_steps = 0.0

    def add_step(self, sequences: int, accepted: int = 0, plain_steps: float = 1.0) -> None:
        """Count a step in which ``sequences`` decoded and ``accepted`` draft tokens in total. It
        took the time of ``plain_steps`` steps without drafts."""
        self._tokens += sequences + accepted
        self._plain_steps += sequences * plain_steps

    def take_average(self) -> float:
        """Return the average and let it decay; called once per beat."""
        pace = self._tokens / self._plain_steps if self._plain_steps else 1.0
        self._tokens *= PACE_DECAY
        self._plain_steps *= PACE_DECAY
        return pace


class StepMeter:
    """Counts the steps of one engine after its warm-up. ``speculation`` is the initial status."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float], speculation: SpeculationStatus
    ) -> None:
        self._engine = engine
        self._speculation = speculation
        self._clock = clock
        self._pace = DecodePace()
        self._marked, self._kv_used, self._starved = clock(), 0.0, False
        engine.scheduler.counters = EngineCounters()
        engine.scheduler.counters.speculation.load_failures = int(bool(speculation.dropped))

    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step and return the tokens drawn in it."""
        counters = self._engine.scheduler.counters
        spec = counters.speculation
        steps, accepted = spec.steps, spec.accepted_tokens
        began = self._mark()
        drawn = self._engine.run(plan)
        seconds = self._mark() - began
        work, decoding = plan.work, len(plan.decode)
        counters.step(work.prompt_tokens, decoding + len(plan.chunks), len(drawn), seconds)
        counters.decode_rows += decoding
        known = self._engine.step_time.known
        if spec.steps == steps or known is None:
            self._pace.add_step(decoding)
        else:
            plain_steps = seconds / max(known.seconds(work), MIN_STEP_S)
            self._pace.add_step(decoding, spec.accepted_tokens - accepted, plain_steps)
        return drawn

    def _mark(self) -> float:
        """Count the time since the last mark with the pool usage of that mark; return the time."""
        now, manager, scheduler = self._clock(), self._engine.manager, self._engine.scheduler
        scheduler.counters.done.add_time(now - self._marked, self._kv_used, starved=self._starved)
        self._marked, self._starved = now, scheduler.starved
        self._kv_used = 1.0 - manager.available / manager.pages
        return now

    def beat(self, outbound_slots_held: int = 0) -> m.EngineBeat:
        """Return the counters and the present load."""
        engine = self._engine
        self._mark()
        s = engine.scheduler
        queued = sum(q.remaining for q in s.queue if q.phase is Phase.WAITING)
        queued += sum(q.remaining for q in s.prefilling)
        if engine.speculator is not None:
            before, self._speculation = self._speculation, engine.speculator.status()
            s.counters.speculation.crashes += self._speculation.dropped != before.dropped
        return m.EngineBeat(
            running=len(s.decoding),
            waiting=len(s.sequences) - len(s.decoding),
            queued_tokens=queued,
            pages_free=engine.manager.available,
            step_model=tuple(engine.step_time.known or ()),
            counters=s.counters,
            speculation=self._speculation,
            pace=self._pace.take_average(),
            outbound_slots_held=outbound_slots_held,
        )
