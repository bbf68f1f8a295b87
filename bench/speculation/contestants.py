"""Engines that decode the same prompts in turns, one slice of the text at a time.

    start (prompts, some steps that do not count) -> slices -> stop

The batch does not change within a slice: no sequence ends, and a slice ends at a token count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.lib.engines import engine_config
from bench.speculation.measurements import (
    Clock,
    RecordingLengths,
    SliceTiming,
    StepTotals,
    TimedModel,
)
from engine.execution.engine import Engine
from engine.execution.speculation_loading import dummy_pass, step_costs
from engine.model.layers import ModelWeights
from engine.model_config.config import ModelConfig
from engine.scheduling.step_policy import plan_decode_step
from engine.speculation.control.controller import Controller
from engine.speculation.control.draft_lengths import DraftLengthPolicy
from engine.speculation.control.latency_curve import LatencyCurve, calibrate
from engine.speculation.control.speculator import Speculator
from engine.speculation.proposers.proposer import Proposer
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

Tokens = tuple[int, ...]
LONGEST = 1024
CHUNK = 512
SETTLE = 6
"""Warm-up steps; a draft model gets one more for every 256 prompt tokens ..."""

SETTLE_TOKENS = 32
"""... unless each sequence has so many new tokens before."""

MakeProposer = Callable[[Engine, int], Proposer]
"""Makes a proposer with at most a given number of draft nodes for an engine."""


@dataclass(frozen=True)
class DecodingLoad:
    """The prompts that all contestants decode."""

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
                sampling=SamplingParams(
                    temperature=self.temperature,
                    seed=i,
                    max_tokens=LONGEST - longest,
                    ignore_eos=True,
                ),
                cache_root=root,
            )
            for i, prompt in enumerate(self.prompts)
        ]


class DecodingContestant:
    """One engine, which decodes without drafts until ``equip`` gives it a proposer."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        batch: int,
        pages: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._model = TimedModel(config, weights, LONGEST)
        self._model.clock = self._clock = clock
        sizes = engine_config(
            pages=pages,
            max_batch=batch,
            chunk=CHUNK,
            max_model_len=LONGEST,
            step_budget_ms=0.0,
            kv_precision="exact",
        )
        self.engine = Engine(self._model, sizes, plan_decode_step, clock)
        self.seen = StepTotals()
        self.texts: dict[int, list[int]] = {}
        self._watch: RecordingLengths | None = None
        self._curve: LatencyCurve | None = None

    def equip(self, make: MakeProposer, most: int, lengths: DraftLengthPolicy | None) -> None:
        """Use a proposer from now on; with ``lengths`` None the controller decides the lengths."""
        proposer = make(self.engine, most)
        vocab = self._model.config.vocab_size
        self._watch = RecordingLengths(lengths or self._controller(proposer))
        self.engine.speculate(Speculator(proposer, self._watch, vocab, self._clock))

    def _controller(self, proposer: Proposer) -> Controller:
        """Create the controller of a worker; the cost curve is measured once."""
        if self._curve is None:
            rows = self.engine.config.max_batch * (1 + proposer.most)
            self._curve = calibrate(dummy_pass(self.engine), rows, self._clock)
            self.engine.manager.evict_unused()  # it wrote where prompts may have been cached
        return Controller(step_costs(self.engine, self._curve), proposer.most, proposer.passes)

    def start(self, load: DecodingLoad) -> None:
        """Add the requests, and run until all of them decode and have run the warm-up steps."""
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

    def slice(self, tokens: int) -> SliceTiming:
        """Decode ``tokens`` more tokens, and return the time that they took."""
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
        return SliceTiming(taken, drawn)

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
    """How many slices each contestant decodes, and how long they are."""

    count: int  # of each
    tokens: int  # of a sequence in each


def compete(
    contestants: Sequence[DecodingContestant], loads: Sequence[DecodingLoad], slices: Slices
) -> list[list[SliceTiming]]:
    """Time all contestants slice by slice, with the order reversed at every other slice.

    The loads repeat until all slices are done. Raises RuntimeError if two texts differ.
    """
    taken: list[list[SliceTiming]] = [[] for _ in contestants]
    for c in contestants:
        c.seen = StepTotals()
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
    """Raise RuntimeError if a text differs from the first contestant's."""
    plain = texts[0]
    for other in texts[1:]:
        for handle, text in other.items():
            both = min(len(text), len(plain[handle]))
            if text[:both] != plain[handle][:both]:
                raise RuntimeError(f"with drafts, sequence {handle} has another text")
