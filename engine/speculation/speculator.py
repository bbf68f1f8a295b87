"""One engine's speculation: whom to propose how much, what, and what came of it.

Whatever goes wrong with a proposer is its own end and nobody else's: it is dropped with a reason,
and decoding goes on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.counters import SpecCounts, SpecFigures
from engine.sequence import Sequence as Running
from engine.speculation.drafts import ROOT, Drafts, first_path
from engine.speculation.lengths import Lengths, Outcome
from engine.speculation.proposer import Advance, Proposer, Tapping
from engine.step_plan import StepPlan
from engine.step_time import Work

log = logging.getLogger("baton.engine")


class Ran(NamedTuple):
    """A step that decoded."""

    plan: StepPlan
    drafts: Drafts | None
    accepted: Sequence[Sequence[int]]  # [B] draft nodes
    work: Work


class Speculator:
    """Owns a proposer and who decides its lengths."""

    def __init__(
        self,
        proposer: Proposer,
        lengths: Lengths,
        vocab: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposer = proposer
        self.lengths = lengths
        self.clock = clock
        self.dropped = ""  # why the proposer is gone
        # Found out once: asking a protocol takes longer than all the rest of a step that is off.
        self._taps = tuple(proposer.taps) if isinstance(proposer, Tapping) else ()
        self._vocab = vocab
        self._seatings: list[int] = []
        self._began = self._draft_s = 0.0

    def figures(self) -> SpecFigures:
        predicted, measured = self.lengths.speedups()
        return SpecFigures(self.proposer.name, self.dropped, predicted, measured)

    @property
    def sees(self) -> bool:
        """Whether the proposer wants to see what the model computes."""
        return self.proposer.wants_hidden and not self.dropped

    @property
    def taps(self) -> Sequence[int]:
        """Layers whose inputs it wants to see."""
        return () if self.dropped else self._taps

    def wanted(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Nodes for each of ``decoding``; empty: none for any."""
        if self.dropped or not decoding:
            return ()
        wanted = self.lengths.wanted(decoding, chunk_tokens)
        return wanted if any(wanted) else ()

    def propose(
        self,
        sequences: Sequence[Running],
        rows: torch.Tensor,
        wanted: Sequence[int],
    ) -> Drafts | None:
        """Drafts for the decoding ``sequences``; None where nothing is proposed to any."""
        began = self.clock()
        try:
            self._forget(sequences)
            drafts = self._checked(self.proposer.propose(sequences, rows, wanted), wanted)
        except Exception as error:
            self._drop(error)
            return None
        finally:
            self._draft_s = self.clock() - began
        if any(s.grammar is not None for s in sequences):
            drafts = _fitting(drafts, sequences)
        return drafts if any(drafts.counts) else None

    def saw(self, advance: Advance) -> None:
        """Show the proposer what the model has computed."""
        try:
            self.proposer.saw(advance)
        except Exception as error:
            self._drop(error)

    def begin(self) -> None:
        """A step that decodes begins."""
        self._began = self.clock()
        self._draft_s = 0.0

    def end(self, step: Ran, counts: SpecCounts) -> None:
        """It has ended as ``step``."""
        drafts, plan = step.drafts, step.plan
        proposed = () if drafts is None else tuple(drafts.counts)
        self.lengths.observe(
            Outcome(
                sequences=plan.decode,
                proposed=proposed,
                accepted=step.accepted if proposed else (),
                rows=step.work.decode_rows + step.work.prompt_tokens,
                kv_tokens=step.work.decode_kv_tokens,
                draft_s=self._draft_s,
                step_s=self.clock() - self._began,
                passes=self.proposer.passes(max(proposed)) if proposed else 0,
                chunked=bool(plan.chunks),
                asked=plan.wanted,
                caught_up_s=self.proposer.caught_up_s if plan.wanted else 0.0,
            )
        )
        if plan.wanted:
            counts.step(proposed, [len(nodes) for nodes in step.accepted], self._draft_s)

    def _forget(self, sequences: Sequence[Running]) -> None:
        seatings = [s.seating for s in sequences]
        if seatings != self._seatings:
            gone = set(self._seatings).difference(seatings)
            self._seatings = seatings
            if gone:
                self.proposer.forget(sorted(gone))

    def _checked(self, drafts: Drafts, wanted: Sequence[int]) -> Drafts:
        """Raises ValueError for what no step could be made of; a token that there is not becomes
        another one, which is a wrong draft."""
        counts, tokens, parents = drafts.counts, drafts.tokens, drafts.parents
        within = all(0 <= n <= most for n, most in zip(counts, wanted, strict=True))
        if not within or tokens.shape != (sum(counts),) or tokens.dtype != torch.int64:
            raise ValueError(
                f"proposed {list(counts)} nodes as {tuple(tokens.shape)} {tokens.dtype};"
                f" wanted were {list(wanted)}"
            )
        if parents is not None:
            if len(parents) != len(tokens):
                raise ValueError(f"proposed {len(tokens)} nodes with {len(parents)} parents")
            places = (place for count in counts for place in range(count))
            if not all(ROOT <= p < place for p, place in zip(parents, places, strict=True)):
                raise ValueError("proposed a node before its parent")
        return Drafts(counts, tokens.clamp(0, self._vocab - 1), parents)

    def _drop(self, error: Exception) -> None:
        self.dropped = f"{type(error).__name__}: {error}"
        log.warning("the %s proposer is dropped", self.proposer.name, exc_info=error)


def _fitting(drafts: Drafts, sequences: Sequence[Running]) -> Drafts:
    """Sequences with a grammar keep the first path of their tree, as far as the grammar takes it:
    beyond, nothing could be met."""
    tokens = drafts.tokens.tolist()
    counts: list[int] = []
    parents: list[int] = []
    kept: list[int] = []
    start = 0
    for index, sequence in enumerate(sequences):
        own = drafts.parents_of(index)
        count, nodes = len(own), list(range(len(own)))
        if sequence.grammar is not None and count:
            nodes = first_path(own)
            path = [tokens[start + node] for node in nodes]
            nodes = nodes[: sequence.grammar.fitting(path)]
            own = list(range(ROOT, len(nodes) - 1))
        kept += [start + node for node in nodes]
        parents += own
        counts.append(len(nodes))
        start += count
    at = torch.tensor(kept, dtype=torch.int64, device=drafts.tokens.device)
    return Drafts(counts, drafts.tokens[at], None if drafts.parents is None else parents)
