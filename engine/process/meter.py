"""Runs the steps of one engine for the server, counts them, and reports the load with each beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.ipc import messages as m
from engine.ipc.counters import EngineCounters, SpeculationStatus
from engine.scheduling.sequence import Phase, Sequence
from engine.scheduling.step_policy import StepPlan

REQUESTS_SHARE, PAGES_SHARE = 0.05, 0.03
"""Changes of the requests and of their uncomputed tokens, as a share of those before, and of the
free pages, as a share of all, that are reported at once."""


class StepMeter:
    """Counts the steps of one engine after its warm-up. ``speculation`` is the initial status."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float], speculation: SpeculationStatus
    ) -> None:
        self._engine = engine
        self._speculation = speculation
        self._clock = clock
        self._marked, self._kv_used, self._starved = clock(), 0.0, False
        # Requests, free pages and tokens of queued prompts at the last beat.
        self._told = 0, engine.manager.available, 0
        self.prompts_taken = 0
        engine.scheduler.counters = EngineCounters()
        engine.scheduler.counters.speculation.load_failures = int(bool(speculation.dropped))

    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step and return the tokens drawn in it."""
        counters = self._engine.scheduler.counters
        began = self._mark()
        drawn = self._engine.run(plan)
        seconds = self._mark() - began
        work, decoding = plan.work, len(plan.decode)
        counters.step(work.prompt_tokens, decoding + len(plan.chunks), len(drawn), seconds)
        counters.decode_rows += decoding
        return drawn

    def _mark(self) -> float:
        """Count the time since the last mark with the pool usage of that mark; return the time."""
        now, manager, scheduler = self._clock(), self._engine.manager, self._engine.scheduler
        scheduler.counters.done.add_time(now - self._marked, self._kv_used, starved=self._starved)
        self._marked, self._starved = now, scheduler.starved
        self._kv_used = 1.0 - manager.available / manager.pages
        return now

    def load_changed(self) -> bool:
        """Return whether the load has changed since the last beat by as much as could change where
        a router places a request."""
        sequences, available, queued = self._told
        manager, present = self._engine.manager, len(self._engine.scheduler.sequences)
        return (
            abs(present - sequences) > REQUESTS_SHARE * sequences
            or abs(manager.available - available) > PAGES_SHARE * manager.pages
            or abs(_tokens(self._prompts()) - queued) > REQUESTS_SHARE * queued
        )

    def _prompts(self) -> list[Sequence]:
        """Return the sequences whose prompts are not computed yet."""
        s = self._engine.scheduler
        return [*(q for q in s.queue if q.phase is Phase.WAITING), *s.prefilling]

    def beat(self, outbound_slots_held: int = 0) -> m.EngineBeat:
        """Return the counters and the present load."""
        engine = self._engine
        self._mark()
        s = engine.scheduler
        prompts = self._prompts()
        queued = _tokens(prompts)
        self._told = len(s.sequences), engine.manager.available, queued
        if engine.speculator is not None:
            before, self._speculation = self._speculation, engine.speculator.status()
            s.counters.speculation.crashes += self._speculation.dropped != before.dropped
        return m.EngineBeat(
            running=len(s.decoding),
            waiting=len(s.sequences) - len(s.decoding),
            queued_tokens=queued,
            queued_prompts=len(prompts),
            computed_tokens=sum(q.computed - q.cached for q in prompts),
            prompts_taken=self.prompts_taken,
            pages_free=engine.manager.available,
            step_model=tuple(engine.step_time.known or ()),
            counters=s.counters,
            speculation=self._speculation,
            outbound_slots_held=outbound_slots_held,
            profile=None if engine.speculator is None else engine.speculator.profile(),
        )


def _tokens(prompts: Iterable[Sequence]) -> int:
    """Return the tokens that are still to be computed. Routers subtract their own prompts: with
    what is cached, a prompt that waits here would be another one's to them."""
    return sum(q.expected_remaining for q in prompts)
