"""Simulated decoding engine for tests of the speculation controller.

Costs and acceptance are known, so that the controller's choices can be compared with the optimum.
Time is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.model_config.config import padded_rows
from engine.scheduling.sequence import Phase, Sequence
from engine.speculation.control.draft_lengths import DraftLengthPolicy, StepOutcome
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

Acceptance = Callable[[Sequence, int], float]
"""Function from a sequence and a step to the acceptance rate of a node whose parent is accepted."""


@dataclass
class SimulatedMachine:
    """Cost model of a pass, in seconds: memory-bound up to the ridge, stepwise in padded rows."""

    step: float = 14e-3
    row: float = 0.25e-3
    ridge: int = 1 << 30  # rows beyond which each costs ``steep``
    steep: float = 0.0
    draft_pass: float = 0.6e-3
    draft_row: float = 5e-6
    overhead: float = 0.0  # seconds of a verification beyond the cost curve
    speed: Callable[[int], float] = lambda step: 1.0  # factor on all costs at a step

    def seconds(self, rows: int) -> float:
        rows = padded_rows(rows)
        return self.step + self.row * rows + self.steep * max(0, rows - self.ridge)


@dataclass
class SimulatedEngine:
    """Simulates a batch that is always full; each sequence has ``length`` tokens."""

    machine: SimulatedMachine
    acceptance: Acceptance
    batch: int
    length: int = 128
    noise: float = 0.03
    proposes: Callable[[Sequence, int], float] = lambda sequence, step: (
        1.0
    )  # probability of a draft
    temperature: Callable[[int], float] = lambda handle: 0.0
    passes: Callable[[int], int] = lambda nodes: nodes
    seed: int = 0
    catch_up: float = 0.0  # seconds of a sequence's first draft, which proposes nothing
    # Rows that a step computes, by its sequences and the most nodes of one; None: those it has
    computed: Callable[[int, int], int] | None = None
    new_shape: float = 0.0  # seconds of the first step with these numbers of nodes
    time: float = 0.0
    tokens: int = 0
    steps: int = 0
    asked: list[int] = field(default_factory=list)  # nodes of each step
    running: list[Sequence] = field(default_factory=list)
    _handles: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._caught: set[int] = set()
        self._shapes: set[tuple[int, ...]] = {()}
        while len(self.running) < self.batch:
            self._join(self._draw.randrange(1, self.length))

    def _join(self, tokens: int) -> None:
        self._handles += 1
        sampling = SamplingParams(temperature=self.temperature(self._handles), max_tokens=tokens)
        request = Request(id="", prompt=(1,) * 8, sampling=sampling, cache_root=b"")
        self.running.append(Sequence(self._handles, request, Phase.DECODE))

    def run(self, lengths: DraftLengthPolicy, tokens: int) -> float:
        """Generate at least ``tokens`` tokens and return the tokens per simulated second."""
        began, had = self.time, self.tokens
        while self.tokens < had + tokens:
            self._advance(lengths)
        return (self.tokens - had) / (self.time - began)

    def _advance(self, lengths: DraftLengthPolicy) -> None:
        sequences = list(self.running)
        wanted = list(lengths.choose_lengths(sequences, 0))
        asked = wanted if any(wanted) else []
        proposed = [self._proposes(s, n) for s, n in zip(sequences, asked, strict=bool(asked))]
        accepted = [
            self._accepted(s, n) for s, n in zip(sequences, proposed, strict=bool(proposed))
        ]
        slower = self.machine.speed(self.steps) * self._noise()
        draft_s = self._draft_seconds(sequences, asked, proposed) * slower
        nodes = sum(proposed)
        rows = len(sequences) + nodes
        if self.computed is not None:
            rows = self.computed(len(sequences), max(proposed, default=0))
        step_s = draft_s + self.machine.seconds(rows) * slower
        step_s += self.machine.overhead * slower * bool(nodes)
        step_s += self.new_shape * (tuple(proposed) not in self._shapes)
        self._shapes.add(tuple(proposed))
        lengths.observe(
            StepOutcome(
                sequences,
                proposed if nodes else (),
                accepted if nodes else (),
                0,
                draft_s,
                step_s,
                self.passes(max(proposed)) if nodes else 0,
                False,
                asked,
            )
        )
        self.time += step_s
        self.steps += 1
        self.asked.append(sum(asked))
        for index, sequence in enumerate(sequences):
            self._emit(sequence, 1 + (len(accepted[index]) if nodes else 0))

    def _proposes(self, sequence: Sequence, asked: int) -> int:
        if not asked:
            return 0
        if self.catch_up and sequence.handle not in self._caught:
            return 0
        return asked if self._draw.random() < self.proposes(sequence, self.steps) else 0

    def _accepted(self, sequence: Sequence, proposed: int) -> list[int]:
        chance = self.acceptance(sequence, self.steps)
        out: list[int] = []
        while len(out) < proposed and self._draw.random() < chance:
            out.append(len(out))
        return out

    def _draft_seconds(
        self, sequences: list[Sequence], asked: list[int], proposed: list[int]
    ) -> float:
        if not asked:
            return 0.0
        late = [s.handle for s, n in zip(sequences, asked, strict=True) if n and self.catch_up]
        late = [handle for handle in late if handle not in self._caught]
        self._caught.update(late)
        machine, passes = self.machine, max(1, self.passes(max(proposed)))
        return (
            machine.draft_pass * passes
            + machine.draft_row * sum(proposed)
            + self.catch_up * len(late)
        )

    def _emit(self, sequence: Sequence, tokens: int) -> None:
        room = sequence.request.length_limit - len(sequence.tokens)
        tokens = min(tokens, room)
        sequence.tokens += [0] * tokens
        self.tokens += tokens
        if tokens == room:
            self.running.remove(sequence)
            self._join(self.length)

    def _noise(self) -> float:
        late = 3.0 if self._draw.random() < 0.01 else 1.0
        return late * self._draw.lognormvariate(0, self.noise)
