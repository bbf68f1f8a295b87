"""Contestants that decode the same prompts, a slice of the text each in turn.

    start (prompts, some steps that do not count) -> slices -> stop

The batch stays what it is: nobody ends in a slice, and a slice ends with so many tokens of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.speculation_seen import Clock, Seen, Taken, TimedModel, Watch
from bench.speculation_text import Tokens
from decode_worker.policy import plan
from engine.config import ModelConfig
from engine.core import Engine, EngineConfig
from engine.layers import Weights
from engine.speculation.controller import Controller
from engine.speculation.costs import Costs
from engine.speculation.curve import Curve, calibrate
from engine.speculation.lengths import Lengths
from engine.speculation.loading import passes_of
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator
from protocol.request import Request, Sampling

LONGEST = 1024
CHUNK = 512
SETTLE = 6
"""Steps before a slice counts; and as many more as a draft model may need for the prompts ..."""

SETTLE_TOKENS = 32
"""... unless drafts have brought so many tokens of each sequence before."""

Make = Callable[[Engine, int], Proposer]
"""A proposer of at most so many nodes for an engine."""


@dataclass(frozen=True)
class Load:
    """What all contestants decode."""

    prompts: Sequence[Tokens]
    tokens: int  # of each, that count
    temperature: float = 0.0

    def requests(self) -> list[Request]:
        root = bytes(16)
        longest = max(map(len, self.prompts))
        return [
            Request(
                id=str(i),
                prompt=prompt,
                sampling=Sampling(
                    temperature=self.temperature,
                    seed=i,
                    max_tokens=LONGEST - longest,
                    ignore_eos=True,
                ),
                cache_root=root,
            )
            for i, prompt in enumerate(self.prompts)
        ]


class Contestant:
    """One engine. Without ``equip`` it decodes plainly."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        batch: int,
        pages: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._model = TimedModel(config, weights, LONGEST)
        self._model.clock = self._clock = clock
        sizes = EngineConfig(
            pages=pages,
            max_batch=batch,
            chunk=CHUNK,
            max_model_len=LONGEST,
            step_budget_ms=0.0,
            kv_precision="exact",
        )
        self.engine = Engine(self._model, sizes, plan, clock)
        self.seen = Seen()
        self.texts: dict[int, list[int]] = {}
        self._watch: Watch | None = None
        self._curve: Curve | None = None

    def equip(self, make: Make, most: int, lengths: Lengths | None) -> None:
        """Propose from now on; ``lengths`` None: as the controller decides."""
        proposer = make(self.engine, most)
        vocab = self._model.config.vocab_size
        self._watch = Watch(lengths or self._controller(proposer))
        self.engine.speculate(Speculator(proposer, self._watch, vocab, self._clock))

    def _controller(self, proposer: Proposer) -> Controller:
        """As a worker has it; the curve is measured once."""
        if self._curve is None:
            rows = self.engine.config.max_batch * (1 + proposer.most)
            self._curve = calibrate(passes_of(self.engine), rows, self._clock)
            self.engine.manager.forget()  # it wrote where prompts may have been cached
        costs = Costs(self._curve, lambda: self.engine.step_time.known)
        return Controller(costs, proposer.most, proposer.passes)

    def start(self, load: Load) -> None:
        """Until all of them decode, and have settled."""
        before = self.engine.scheduler.counters.preemptions
        self.texts = {}
        for handle, request in enumerate(load.requests()):
            self.engine.generate(handle, request)
        while len(self.engine.scheduler.decoding) < len(load.prompts):
            self._step()
        prompts, drawn = sum(map(len, load.prompts)), 0
        for _ in range(SETTLE + prompts // 256):
            if drawn < SETTLE_TOKENS * len(load.prompts):
                drawn += self._step()
        assert self.engine.scheduler.counters.preemptions == before, "more pages are needed"

    def slice(self, tokens: int) -> Taken:
        """Decode until ``tokens`` more are there."""
        seen, model = self.seen, self._model
        drawn, before = 0, model.spent
        if self._watch is not None:
            self._watch.seen = seen
        began = self._clock()
        while drawn < tokens:
            drawn += self._step()
            seen.steps += 1
        taken = self._clock() - began
        if self._watch is not None:
            self._watch.seen = None
        seen.tokens += drawn
        seen.seconds += taken
        seen.pass_s += model.spent - before
        return Taken(taken, drawn)

    def stop(self) -> None:
        for handle in list(self.engine.scheduler.sequences):
            self.engine.drop(handle)
        speculator = self.engine.speculator
        assert speculator is None or not speculator.dropped, speculator.dropped

    def _step(self) -> int:
        out = self.engine.run(self.engine.plan())
        for token in out:
            self.texts.setdefault(token.handle, []).append(token.token)
        return len(out)


@dataclass(frozen=True)
class Slices:
    """How long contestants are measured."""

    count: int  # of each
    tokens: int  # of a sequence in each


def compete(
    contestants: Sequence[Contestant], loads: Sequence[Load], slices: Slices
) -> list[list[Taken]]:
    """What each contestant took, slice by slice. Whose turn is first changes; the
    loads are taken in turn, as often as it needs. Raises RuntimeError where texts differ."""
    taken: list[list[Taken]] = [[] for _ in contestants]
    for c in contestants:
        c.seen = Seen()
    turn = 0
    while len(taken[0]) < slices.count:
        load = loads[turn % len(loads)]
        turn += 1
        for c in contestants:
            c.start(load)
        left = slices.count - len(taken[0])
        for i in range(min(left, max(1, load.tokens // slices.tokens))):
            order = list(enumerate(contestants))
            for at, c in order if i % 2 else reversed(order):
                taken[at].append(c.slice(slices.tokens * len(load.prompts)))
        for c in contestants:
            c.stop()
        _compare([c.texts for c in contestants])
    return taken


def _compare(texts: Sequence[dict[int, list[int]]]) -> None:
    """All say the same, as far as they have come."""
    plain = texts[0]
    for other in texts[1:]:
        for handle, text in other.items():
            both = min(len(text), len(plain[handle]))
            if text[:both] != plain[handle][:both]:
                raise RuntimeError(f"with drafts, sequence {handle} has another text")
