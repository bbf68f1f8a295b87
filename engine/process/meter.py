"""Runs the steps of one engine, counts what they do, and tells it with every beat."""

from __future__ import annotations

from collections.abc import Callable

from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.ipc import messages as m
from engine.ipc.counters import Counters, SpecFigures
from engine.scheduling.scheduler import StepPlan
from engine.scheduling.sequence import Phase
from engine.scheduling.step_time import SHORTEST_S

REMEMBER = 0.9
"""Of what earlier beats said of the pace, each beat leaves so much: the last five seconds count."""


class Pace:
    """Tokens that a sequence got in the time of a plain step, over the last beats."""

    def __init__(self) -> None:
        self._tokens = self._plain_steps = 0.0

    def step(self, sequences: int, accepted: int = 0, plain_steps: float = 1.0) -> None:
        """One in which ``sequences`` decoded and accepted so many drafts together, and which took
        the time of ``plain_steps`` plain ones."""
        self._tokens += sequences + accepted
        self._plain_steps += sequences * plain_steps

    def of_late(self) -> float:
        """Asked once a beat."""
        pace = self._tokens / self._plain_steps if self._plain_steps else 1.0
        self._tokens *= REMEMBER
        self._plain_steps *= REMEMBER
        return pace


class Meter:
    """What warmed the engine up does not count. ``speculation``: how it stood at the start."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float], speculation: SpecFigures
    ) -> None:
        self._engine = engine
        self._speculation = speculation
        self._clock = clock
        self._pace = Pace()
        self._marked, self._kv_used, self._starved = clock(), 0.0, False
        engine.scheduler.counters = Counters()
        engine.scheduler.counters.speculation.load_failures = int(bool(speculation.dropped))

    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step; returns the tokens drawn in it."""
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
            self._pace.step(decoding)
        else:
            plain_steps = seconds / max(known.seconds(work), SHORTEST_S)
            self._pace.step(decoding, spec.accepted_tokens - accepted, plain_steps)
        return drawn

    def _mark(self) -> float:
        """Count the time since the last mark, in which pages were as they were then; the time."""
        now, manager, scheduler = self._clock(), self._engine.manager, self._engine.scheduler
        scheduler.counters.done.passed(now - self._marked, self._kv_used, starved=self._starved)
        self._marked, self._starved = now, scheduler.starved
        self._kv_used = 1.0 - manager.available / manager.pages
        return now

    def beat(self) -> m.Beat:
        """The load, as it is now."""
        engine = self._engine
        self._mark()
        s = engine.scheduler
        queued = sum(q.remaining for q in s.queue if q.phase is Phase.WAITING)
        queued += sum(q.remaining for q in s.prefilling)
        if engine.speculator is not None:
            before, self._speculation = self._speculation, engine.speculator.figures()
            s.counters.speculation.crashes += self._speculation.dropped != before.dropped
        return m.Beat(
            running=len(s.decoding),
            waiting=len(s.sequences) - len(s.decoding),
            queued_tokens=queued,
            pages_free=engine.manager.available,
            step_model=tuple(engine.step_time.known or ()),
            counters=s.counters,
            speculation=self._speculation,
            pace=self._pace.of_late(),
        )
