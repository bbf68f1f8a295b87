"""Schedules drawn at random, and an engine that lives through them. For any model: the text of a
request must be the one that it has alone, whatever the others do.

A test takes the model (and the KV precision) that it is about:

    lives = Lives(model, kv_precision="exact")
    @given(schedules()) ... lives.check(schedule)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.model.decoder import DecoderModel
from engine.scheduling.step_policy import plan_decode_step
from protocol.requests import Request
from tests.engine.conftest import drain, request

POOL = 40
"""Requests that schedules choose from."""

STEPS = 3000
"""More steps than any schedule takes: who has not ended by then starves."""

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.8, "presence_penalty": 0.4},
]


def pool(vocab: int = 320) -> list[Request]:
    """Greedy and seeded requests; some share a prefix, some a whole prompt."""
    draw = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocab) for _ in range(count)]

    system = [tokens(100), tokens(64)]
    whole = [tokens(130), tokens(96)]
    prompts = [
        lambda: tokens(draw.choice([1, 7, 31, 32, 33, 90, 150])),
        lambda: system[draw.randrange(2)] + tokens(draw.choice([1, 20, 50])),
        lambda: list(whole[draw.randrange(2)]),
    ]
    return [
        request(f"r{i}", prompts[i % 3](), max_tokens=draw.randrange(1, 45), seed=i, **KINDS[i % 5])
        for i in range(POOL)
    ]


@dataclass(frozen=True)
class Arrival:
    """A request of the pool: when it comes, how urgent it is, and how it comes."""

    index: int
    step: int
    priority: int
    emitted: float  # share of its text that the client already has
    cancel_after: int | None  # steps


@dataclass(frozen=True)
class Schedule:
    """Everything that happens to one engine, and its sizes."""

    arrivals: tuple[Arrival, ...]
    pages: int
    chunk: int
    max_batch: int
    step_ms: tuple[float, ...]  # how long steps seem to take, in turn


@st.composite
def schedules(draw: st.DrawFn, most: int = 32) -> Schedule:
    """Up to ``most`` requests at once; often more than the pages or the rows are for."""
    indices = draw(st.lists(st.integers(0, POOL - 1), min_size=1, max_size=most, unique=True))
    spread = draw(st.sampled_from([0, 10, 60]))
    cancels = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 40))
    arrivals = [
        Arrival(
            index,
            draw(st.integers(0, spread)),
            draw(st.sampled_from([0, 0, 0, -5, 3])),
            draw(st.sampled_from([0.0, 0.0, 0.5])),
            draw(cancels),
        )
        for index in indices
    ]
    return Schedule(
        arrivals=tuple(arrivals),
        pages=draw(st.sampled_from([8, 12, 24, 60, 200])),  # the longest request needs 7
        chunk=draw(st.sampled_from([16, 64, 512])),
        max_batch=draw(st.sampled_from([1, 4, 32])),
        step_ms=draw(st.lists(st.sampled_from([0.1, 2.0, 9.0, 60.0]), min_size=1, max_size=5)
                     .map(tuple)),
    )  # fmt: skip


class ScheduleRunner:
    """Runs schedules on engines of one model, and knows what every request says alone."""

    def __init__(self, model: DecoderModel, **config: Any) -> None:
        self._model = model
        self._config = config
        self.requests = pool(model.config.vocab_size)
        self.alone = [self._alone(r) for r in self.requests]
        self.preempted = 0
        self.shared_tokens = 0

    def engine(self, clock: Callable[[], float] = lambda: 0.0, **sizes: Any) -> Engine:
        base = {"pages": 64, "max_batch": 8, "chunk": 64, "max_model_len": 1024, **self._config}
        return Engine(self._model, engine_config(**{**base, **sizes}), plan_decode_step, clock)

    def _alone(self, wanted: Request) -> list[int]:
        engine = self.engine()
        engine.generate(0, wanted)
        return drain(engine)[0]

    def check(self, schedule: Schedule) -> None:
        """Every request that is not cancelled ends, and what anyone says is what it says alone."""
        engine = self.engine(
            _clock(schedule.step_ms),
            pages=schedule.pages,
            chunk=schedule.chunk,
            max_batch=schedule.max_batch,
            step_budget_ms=10.0,
        )
        out = self._live(engine, schedule)
        for handle, arrival in enumerate(schedule.arrivals):
            expected = self.alone[arrival.index][self._already(arrival) :]
            got = out.get(handle, [])
            if arrival.cancel_after is not None:
                expected = expected[: len(got)]
            assert got == expected, (handle, arrival)
        assert not engine.scheduler.sequences
        assert engine.manager.available == schedule.pages
        assert len(engine.scheduler._rows) == schedule.max_batch
        assert not engine.scheduler._in_flight._owner

    def _already(self, arrival: Arrival) -> int:
        return int(arrival.emitted * (len(self.alone[arrival.index]) - 1))

    def _live(self, engine: Engine, schedule: Schedule) -> dict[int, list[int]]:
        preempt = engine.scheduler._preempt

        def counted(sequence: Any) -> None:
            self.preempted += 1
            preempt(sequence)

        engine.scheduler._preempt = counted  # type: ignore[method-assign]
        out: dict[int, list[int]] = {}
        last = max(a.step + (a.cancel_after or 0) for a in schedule.arrivals)
        for step in range(STEPS):
            for handle, arrival in enumerate(schedule.arrivals):
                if arrival.step == step:
                    engine.generate(handle, self._request(arrival))
                if arrival.cancel_after is not None and step == arrival.step + arrival.cancel_after:
                    engine.drop(handle)
            planned = engine.plan()
            self.shared_tokens += sum(s.cached for s in engine.scheduler.take_started())
            for token in engine.run(planned) if planned else []:
                out.setdefault(token.handle, []).append(token.token)
            if step >= last and not engine.scheduler.sequences:
                return out
            assert planned or step < last or engine.scheduler.sequences == {}
        raise AssertionError(f"still there after {STEPS} steps: {engine.scheduler.sequences}")

    def _request(self, arrival: Arrival) -> Request:
        wanted = msgspec.structs.replace(self.requests[arrival.index], priority=arrival.priority)
        already = self._already(arrival)
        return wanted.resumed(self.alone[arrival.index][:already]) if already else wanted


def _clock(step_ms: Iterable[float]) -> Callable[[], float]:
    """Each step seems to take the next of ``step_ms``: it is read at both ends of a step."""
    now = itertools.accumulate(
        itertools.chain.from_iterable((0.0, ms / 1e3) for ms in itertools.cycle(step_ms))
    )
    return lambda: next(now)
