"""Speculating engines under test, checked after every step.

A schedule checks that no page leaks and that every output, log-probabilities included, equals that
of a plain engine which runs the request alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.execution.stepper import TokenOut
from engine.model.decoder import DecoderModel
from engine.scheduling.sequence import Sequence as Running
from engine.scheduling.sequence import blocks_for
from engine.scheduling.step_policy import StepPlan, plan_decode_step
from engine.speculation.control.draft_lengths import (
    DraftLengthPolicy,
    StepOutcome,
)
from engine.speculation.control.speculator import Speculator
from engine.speculation.proposers.proposer import Proposer
from protocol.requests import Request
from tests.engine.conftest import request
from tests.engine.grammars import Constrained, regex, schema
from tests.engine.schedules import POOL, Schedule, ScheduleRunner

EOS = 2
ITEM = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["xy", "xz"]}}}

SAMPLING_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"logprobs": 2},
    {"temperature": 0.0, "logprobs": 0, "frequency_penalty": 1.2, "presence_penalty": 0.3},
    {"top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 0.6},  # favors repetition
    {"top_k": 20, "min_p": 0.02, "logit_bias": ((7, 4.0), (300, -100.0))},
    {"min_tokens": 9, "ignore_eos": False, "logit_bias": ((EOS, 9.0),), "logprobs": 1},
    {"temperature": 0.0, "stop_token_ids": tuple(range(3, 320, 9))},
    {"grammar": regex("([a-c]{2,5}-){1,9}"), "logprobs": 3},
    {"temperature": 0.0, "grammar": schema({"type": "array", "items": ITEM, "minItems": 2})},
    {"temperature": 0.0, "prompt_logprobs": 1, "logit_bias": ((9, 6.0),)},
    {"frequency_penalty": 0.7, "min_tokens": 20, "stop_token_ids": (5, 6, 7, 8, 9)},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(3, 9)), "logprobs": 5},
    {"allowed_token_ids": (5, 9, 11), "logprobs": 0, "logprob_token_ids": (5, 300)},
]


def mixed_requests(vocab: int, grammars: bool, count: int) -> list[Request]:
    """Make ``count`` requests of all kinds; some share a prefix, some are choices of one prompt."""
    draw = random.Random(21)
    kinds = [wish for wish in SAMPLING_KINDS if grammars or "grammar" not in wish]

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocab) for _ in range(count)]

    system, whole = tokens(100), tokens(70)
    prompts = [
        lambda: tokens(draw.choice([1, 7, 31, 32, 33, 90, 140])),
        lambda: system + tokens(draw.choice([1, 20])),
        lambda: whole,
        lambda: tokens(9) * draw.choice([3, 7]),
    ]
    made = []
    for i in range(count):
        prompt = prompts[i % 4]()
        options: dict[str, Any] = {
            **{"max_tokens": draw.randrange(2, 45), "temperature": 1.0, "seed": i // 3},
            **{"choice": i % 3},
            **kinds[i % len(kinds)],
        }
        if "min_tokens" in options:
            options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
        made.append(request(f"r{i}", prompt, **options))
    return made


class CheckedEngine(Engine):
    """Engine that compiles grammars itself, records all output and checks the pages each step."""

    def __init__(self, grammars: Constrained | None, *args: Any) -> None:
        super().__init__(*args)
        self._grammars = grammars
        self.said: dict[int, list[TokenOut]] = {}

    def generate(self, handle: int, request: Request, grammar: Any = None) -> None:
        if grammar is None and self._grammars is not None:
            grammar = self._grammars.of(request)
        super().generate(handle, request, grammar)

    def run(self, plan: StepPlan) -> list[TokenOut]:
        out = super().run(plan)
        for token in out:
            self.said.setdefault(token.handle, []).append(token)
        self.look()
        return out

    def look(self) -> None:
        """Assert that no page leaked and that no sequence holds more pages than its text needs."""
        sequences = self.scheduler.sequences.values()
        held = {page for s in sequences for page in s.pages}
        assert self.manager.available == self.manager.pages - len(held)
        for s in self.scheduler.decoding:
            assert s.computed == len(s.tokens) - 1
            assert blocks_for(s.computed) <= len(s.pages) <= blocks_for(len(s.tokens))


class RandomLengths(DraftLengthPolicy):
    """Draft lengths drawn at random per sequence and step, up to ``most``; some steps have none."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self._most = most
        self._draw = random.Random(seed)
        self.outcomes: list[StepOutcome] = []

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        if self._draw.random() < 0.15:
            return ()
        return [self._draw.choice([0, 1, self._most, self._most]) for _ in decoding]

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


MakeProposer = Callable[[Engine], Proposer]


class SpeculatingRunner(ScheduleRunner):
    """Runs schedules on engines that speculate with what ``proposer`` makes; None means plain ones.

    The expected output of each request is computed once, by a plain engine that runs it alone."""

    def __init__(
        self, model: DecoderModel, grammars: Constrained | None, count: int = POOL, **config: Any
    ) -> None:
        self._model, self._grammars, self._config = model, grammars, config
        self.proposer: MakeProposer | None = None
        self.lengths: Callable[[], DraftLengthPolicy] = lambda: RandomLengths(4)
        self.preempted = self.shared_tokens = 0
        self.drafted = self.accepted = 0
        self.dropped = ""  # why the last engine dropped its proposer, if it did
        self.requests = mixed_requests(model.config.vocab_size, grammars is not None, count)
        self.reports: list[list[TokenOut]] = []
        self.alone = [self._alone(r) for r in self.requests]
        self._texts = {
            (r.id, r.sampling.choice): [*r.prompt, *text]
            for r, text in zip(self.requests, self.alone, strict=True)
        }

    def text(self, sequence: Running) -> list[int]:
        """Return the complete expected text of a sequence."""
        wanted = sequence.request
        return self._texts[wanted.id, wanted.sampling.choice]

    def with_(
        self, proposer: MakeProposer, lengths: Callable[[], DraftLengthPolicy] | None = None
    ) -> SpeculatingRunner:
        """Use this proposer from now on and reset the counts; return self."""
        self.drafted = self.accepted = self.preempted = 0
        self.proposer = proposer
        if lengths is not None:
            self.lengths = lengths
        return self

    def engine(self, clock: Callable[[], float] = lambda: 0.0, **sizes: Any) -> CheckedEngine:
        base = {"pages": 64, "max_batch": 8, "chunk": 64, "max_model_len": 1024, **self._config}
        config = engine_config(**{**base, **sizes})
        engine = CheckedEngine(self._grammars, self._model, config, plan_decode_step, clock)
        if self.proposer is not None:
            vocab = self._model.config.vocab_size
            engine.speculate(Speculator(self.proposer(engine), self.lengths(), vocab))
        return engine

    def _alone(self, wanted: Request) -> list[int]:
        engine = self.engine()
        engine.generate(0, wanted)
        while planned := engine.plan():
            engine.run(planned)
        self.reports.append(engine.said[0])
        return [token.token for token in engine.said[0]]

    def _live(self, engine: Engine, schedule: Schedule) -> dict[int, list[int]]:
        assert isinstance(engine, CheckedEngine)
        out = super()._live(engine, schedule)
        for handle, said in engine.said.items():
            arrival = schedule.arrivals[handle]
            already = self._already(arrival)
            expected = self.reports[arrival.index][already : already + len(said)]
            for ours, alone in zip(said, expected, strict=True):
                assert_same_output(ours, alone, resumed=already > 0)
        counts = engine.scheduler.counters.speculation
        self.drafted += counts.draft_tokens
        self.accepted += counts.accepted_tokens
        self.dropped = engine.speculator.dropped if engine.speculator is not None else ""
        return out


def assert_same_output(ours: TokenOut, alone: TokenOut, resumed: bool = False) -> None:
    """Assert equal token, finish reason and log-probabilities."""
    assert (ours.token, ours.finish) == (alone.token, alone.finish)
    assert_logprobs_close(ours.logprobs, alone.logprobs)
    if not resumed:
        assert len(ours.prompt_logprobs) == len(alone.prompt_logprobs)
        for a, b in zip(ours.prompt_logprobs, alone.prompt_logprobs, strict=True):
            assert_logprobs_close(a, b)


def assert_logprobs_close(ours: Any, alone: Any) -> None:
    """Assert the same tokens, and log-probabilities that are equal up to rounding."""
    assert (ours is None) == (alone is None)
    if ours is not None:
        assert (ours.rank, ours.top_tokens) == (alone.rank, alone.top_tokens)
        assert ours.logprob == pytest.approx(alone.logprob, abs=1e-4)
        assert ours.top_logprobs == pytest.approx(alone.top_logprobs, abs=1e-4)


def constrained(folder: Path) -> Constrained:
    return Constrained(folder, 320, (EOS,))
