"""Sums over a contestant's steps, the speed-up that the formula predicts, and tables of both.

Expected tokens of a step are (1 - a^(K+1)) / (1 - a) where each of K drafts in a chain is accepted
with probability a, given those before it (Leviathan et al., 2023, equation 1). Over a plain step of
one, a step with drafts takes as much longer as its pass takes longer, and what proposing takes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from bench.lib.report import ResultRow
from engine.model.decoder import DecoderModel
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.draft_lengths import DraftLengthPolicy, StepOutcome
from protocol.performance.draft_choice import expected_tokens
from protocol.performance.speculation_profile import SpeculationProfile

RESAMPLES = 1000
Clock = Callable[[], float]


@dataclass
class StepTotals:
    """Sums over the steps that are measured."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    pass_s: float = 0.0  # of the model itself
    draft_s: float = 0.0  # of proposing
    lengths: Counter[int] = field(default_factory=Counter)  # of drafts: 0 is none
    accepted: int = 0
    rejected: int = 0  # drafts that were not accepted as a whole
    trees: bool = False

    def add(self, outcome: StepOutcome) -> None:
        self.draft_s += outcome.draft_s
        if not outcome.proposed:
            self.lengths[0] += len(outcome.sequences)
            return
        self.lengths.update(outcome.proposed)
        for count, nodes in zip(outcome.proposed, outcome.accepted, strict=True):
            self.accepted += len(nodes)
            self.rejected += len(nodes) < count
            self.trees |= list(nodes) != list(range(len(nodes)))

    @property
    def acceptance(self) -> float:
        """Acceptance rate of a draft token, given that those before it were accepted."""
        tested = self.accepted + self.rejected
        return self.accepted / tested if tested else 0.0

    @property
    def each(self) -> float:
        """Mean tokens per sequence and step."""
        return 1.0 + self.accepted / max(1, self.lengths.total())

    def expected(self) -> float:
        """Return the tokens per step by the formula; a tree's tokens are taken as measured."""
        if self.trees:
            return self.each
        found = sum(n * expected_tokens(self.acceptance, k) for k, n in self.lengths.items())
        return found / max(1, self.lengths.total())

    def predicted(self, plain: StepTotals) -> float:
        """Predict the speed-up: expected tokens over the expected duration in plain steps.

        The time of a plain step outside of the model's pass is added to a step with drafts.
        """
        step = plain.seconds / plain.steps
        beside = max(0.0, plain.seconds - plain.pass_s) / plain.steps
        return self.expected() * step / ((self.pass_s + self.draft_s) / self.steps + beside)


class RecordingLengths(DraftLengthPolicy):
    """Delegates draft lengths to ``inner``, and adds up the outcomes."""

    def __init__(self, inner: DraftLengthPolicy) -> None:
        self._inner = inner
        self.seen: StepTotals | None = None

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        return self._inner.choose_lengths(decoding, chunk_tokens)

    @property
    def idle(self) -> bool:
        return self._inner.idle

    def skips_observation(self) -> bool:
        return self._inner.skips_observation()

    def observe(self, outcome: StepOutcome) -> None:
        self._inner.observe(outcome)
        if self.seen is not None:
            self.seen.add(outcome)

    def speedups(self) -> tuple[float, float]:
        return self._inner.speedups()

    def profile(self) -> SpeculationProfile | None:
        return self._inner.profile()


class TimedModel(DecoderModel):
    """A model that adds up the time of its passes in ``spent``."""

    spent = 0.0
    clock: Clock = staticmethod(time.perf_counter)

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the hidden states [rows, hidden], and add the time."""
        began = self.clock()
        out = super().hidden(*args, **kwargs)
        self.spent += self.clock() - began
        return out

    def logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the logits [rows, vocab] of hidden states [rows, hidden], and add the time."""
        began = self.clock()
        out = super().logits(*args, **kwargs)
        self.spent += self.clock() - began
        return out


@dataclass(frozen=True)
class SpeedupInterval:
    """A speed-up with its 95% interval."""

    value: float
    low: float
    high: float


class SliceTiming(NamedTuple):
    """The time and the tokens of one slice of the text."""

    seconds: float
    tokens: int


def speedup(plain: Sequence[SliceTiming], other: Sequence[SliceTiming]) -> SpeedupInterval:
    """Return the speed-up of ``other`` over ``plain``, from all tokens and seconds of the pairs.

    The interval is that of resampled pairs (Efron, 1979).
    """
    draw, pairs = random.Random(0), list(zip(plain, other, strict=True))

    def ratio(chosen: Sequence[tuple[SliceTiming, SliceTiming]]) -> float:
        ours, theirs = (
            SliceTiming(*map(sum, zip(*side, strict=True))) for side in zip(*chosen, strict=True)
        )
        return theirs.tokens / theirs.seconds * ours.seconds / ours.tokens

    found = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = found[RESAMPLES // 40], found[-1 - RESAMPLES // 40]
    return SpeedupInterval(ratio(pairs), low, high)


CONTROLLER = 0
"""Stands for a fixed length where the controller decides."""


@dataclass(frozen=True)
class SpeedupCell:
    """One length, or the controller, at one batch size, beside plain decoding in the same run."""

    subject: str  # target and proposer
    batch: int
    length: int  # nodes; CONTROLLER
    speedup: SpeedupInterval
    plain: StepTotals
    seen: StepTotals

    @property
    def predicted(self) -> float:
        return self.seen.predicted(self.plain)

    @property
    def plain_rate(self) -> float:
        return self.plain.tokens / self.plain.seconds

    def rows(self) -> Iterator[ResultRow]:
        how = f"K={self.length}" if self.length else "controller"
        name = f"{self.subject}, batch {self.batch}, {how}"
        s, r = self.seen, self.speedup
        if self.length:
            against = (
                f"formula {self.predicted:.2f}: a={s.acceptance:.2f}, {s.each:.2f} tokens,"
                f" pass {s.pass_s / s.steps * 1e3:.2f} ms, drafts {s.draft_s / s.steps * 1e3:.2f}"
            )
            yield ResultRow(name, r.value, "x plain", against, r.value / self.predicted)
        else:
            against = f"plain {self.plain_rate:.0f} tok/s; 95%: {r.low:.3f} to {r.high:.3f}"
            yield ResultRow(name, r.value, "x plain", against, r.value)


def tables(cells: Sequence[SpeedupCell]) -> Iterator[str]:
    """Yield a Markdown table per subject: speed-ups by batch size, the formula's in brackets."""
    for subject in dict.fromkeys(cell.subject for cell in cells):
        own = [cell for cell in cells if cell.subject == subject]
        lengths = sorted({cell.length for cell in own if cell.length})
        heads = ["batch", "plain", "accepted", *(f"K={k}" for k in lengths), "controller", "95%"]
        lines = [subject + ":", "", _line(heads), _line(["---"] * len(heads))]
        for batch in dict.fromkeys(cell.batch for cell in own):
            at = {cell.length: cell for cell in own if cell.batch == batch}
            lines.append(_line(_values(at, batch, lengths)))
        yield "\n".join([*lines, ""])


def _values(at: dict[int, SpeedupCell], batch: int, lengths: Sequence[int]) -> Iterator[str]:
    some = next(iter(at.values()))
    longest = max(at)
    yield str(batch)
    yield f"{some.plain_rate:.0f}/s"
    yield _accepted(at[longest].seen) if longest else "-"
    for k in lengths:
        cell = at.get(k)
        yield f"{cell.speedup.value:.2f} ({cell.predicted:.2f})" if cell else "-"
    if CONTROLLER in at:
        ratio = at[CONTROLLER].speedup
        yield f"{ratio.value:.2f}"
        yield f"{ratio.low:.2f}-{ratio.high:.2f}"
    else:
        yield from ("-", "-")


def _accepted(seen: StepTotals) -> str:
    """Format the acceptance rate of a chain, or the tokens per step of a tree."""
    return f"{seen.each:.1f} tokens" if seen.trees else f"{seen.acceptance:.2f}"


def _line(values: Sequence[str] | Iterator[str]) -> str:
    return f"| {' | '.join(values)} |"
