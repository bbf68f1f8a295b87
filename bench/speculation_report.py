"""Figures of the benchmark of speculation: rows for the result line, and tables to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.report import Row
from bench.speculation_seen import Ratio, Seen

CONTROLLER = 0
"""In the place of a fixed length."""


@dataclass(frozen=True)
class Cell:
    """One length, or the controller, at one batch size: beside plain decoding in the same run."""

    subject: str  # target and proposer
    batch: int
    length: int  # nodes; CONTROLLER
    speedup: Ratio
    plain: Seen
    seen: Seen

    @property
    def predicted(self) -> float:
        return self.seen.predicted(self.plain)

    @property
    def plain_rate(self) -> float:
        return self.plain.tokens / self.plain.seconds

    def rows(self) -> Iterator[Row]:
        how = f"K={self.length}" if self.length else "controller"
        name = f"{self.subject}, batch {self.batch}, {how}"
        s, r = self.seen, self.speedup
        if self.length:
            against = (
                f"formula {self.predicted:.2f}: a={s.acceptance:.2f}, {s.each:.2f} tokens,"
                f" pass {s.pass_s / s.steps * 1e3:.2f} ms, drafts {s.draft_s / s.steps * 1e3:.2f}"
            )
            yield Row(name, r.value, "x plain", against, r.value / self.predicted)
        else:
            against = f"plain {self.plain_rate:.0f} tok/s; 95%: {r.low:.3f} to {r.high:.3f}"
            yield Row(name, r.value, "x plain", against, r.value)


def tables(cells: Sequence[Cell]) -> Iterator[str]:
    """Markdown: for each subject the batch sizes, what is accepted of the longest drafts, and
    speed-ups with the formula's in brackets."""
    for subject in dict.fromkeys(cell.subject for cell in cells):
        own = [cell for cell in cells if cell.subject == subject]
        lengths = sorted({cell.length for cell in own if cell.length})
        heads = ["batch", "plain", "accepted", *(f"K={k}" for k in lengths), "controller", "95%"]
        lines = [subject + ":", "", _line(heads), _line(["---"] * len(heads))]
        for batch in dict.fromkeys(cell.batch for cell in own):
            at = {cell.length: cell for cell in own if cell.batch == batch}
            lines.append(_line(_values(at, batch, lengths)))
        yield "\n".join([*lines, ""])


def _values(at: dict[int, Cell], batch: int, lengths: Sequence[int]) -> Iterator[str]:
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


def _accepted(seen: Seen) -> str:
    """Of a chain, the formula's a; of a tree, which has none, tokens of a step."""
    return f"{seen.each:.1f} tokens" if seen.trees else f"{seen.acceptance:.2f}"


def _line(values: Sequence[str] | Iterator[str]) -> str:
    return f"| {' | '.join(values)} |"
