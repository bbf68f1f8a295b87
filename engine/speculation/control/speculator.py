"""One engine's speculation: whom to propose how much, what, and what came of it.

Whatever goes wrong with a proposer, or with who decides its lengths, is the end of speculation and
of nothing else: both are dropped with a reason, their memory is free, and decoding goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.ipc.counters import SpeculationCounters, SpeculationStatus
from engine.scheduling.sequence import Sequence as Running
from engine.scheduling.step_policy import StepPlan
from engine.scheduling.step_time import StepWork
from engine.speculation.control.draft_lengths import (
    DraftLengthPolicy,
    FixedDraftLength,
    StepOutcome,
)
from engine.speculation.drafts import ROOT, Drafts, first_path
from engine.speculation.proposers.proposer import LayerTapProposer, Proposer, VerifiedStep

# MERGED engine.speculation.fitting
# What a grammar leaves of what is proposed.


def trim_to_grammar(drafts: Drafts, sequences: Sequence[Running]) -> Drafts:
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
            nodes = nodes[: sequence.grammar.count_matching(path)]
            own = list(range(ROOT, len(nodes) - 1))
        kept += [start + node for node in nodes]
        parents += own
        counts.append(len(nodes))
        start += count
    at = torch.tensor(kept, dtype=torch.int64, device=drafts.tokens.device)
    return Drafts(counts, drafts.tokens[at], None if drafts.parents is None else parents)


log = logging.getLogger("baton.engine")


class DecodedStep(NamedTuple):
    """A step that decoded."""

    plan: StepPlan
    drafts: Drafts | None
    accepted: Sequence[Sequence[int]]  # [B] draft nodes
    work: StepWork


class Speculator:
    """Owns a proposer and who decides its lengths. Nobody else keeps either: when they are dropped,
    their weights and pools go with them."""

    def __init__(
        self,
        proposer: Proposer,
        lengths: DraftLengthPolicy,
        vocab: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proposer: Proposer | None = proposer  # None: dropped
        self.lengths = lengths
        self.clock = clock
        self.dropped = ""  # why the proposer is gone
        # Layers whose inputs it wants to see. Found out once: asking a protocol takes longer than
        # all the rest of a step that is off.
        self.taps: Sequence[int] = (
            tuple(proposer.taps) if isinstance(proposer, LayerTapProposer) else ()
        )
        self._name = proposer.name
        self._vocab = vocab
        self._seatings: list[int] = []  # of whom it was last asked about
        self._stays: dict[int, Running] = {}  # by seating, that it may know of
        self._began = self._draft_s = 0.0

    def decide_by(self, make: Callable[[Proposer], DraftLengthPolicy]) -> None:
        """Lengths are decided by what ``make`` makes for the proposer, if it still is there."""
        if self.proposer is None:
            return
        try:
            self.lengths = make(self.proposer)
        except Exception as error:
            self._drop(error)

    def figures(self) -> SpeculationStatus:
        try:
            predicted, measured = self.lengths.speedups()
        except Exception as error:
            self._drop(error)
            predicted = measured = 1.0
        return SpeculationStatus(self._name, self.dropped, predicted, measured)

    @property
    def sees(self) -> bool:
        """Whether the proposer is to see what the model computes."""
        if self.proposer is None or not self.proposer.wants_hidden:
            return False
        try:
            return not self.lengths.resting
        except Exception as error:
            self._drop(error)
            return False

    def wanted(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Nodes for each of ``decoding``; empty: none for any."""
        if self.proposer is None or not decoding:
            return ()
        try:
            wanted = self.lengths.wanted(decoding, chunk_tokens)
            if not any(wanted):
                return ()
            if len(wanted) != len(decoding):
                raise ValueError(f"decided {len(wanted)} lengths for {len(decoding)} sequences")
            return [int(nodes) for nodes in wanted]
        except Exception as error:
            self._drop(error)
            return ()

    def propose(
        self,
        sequences: Sequence[Running],
        rows: torch.Tensor,
        wanted: Sequence[int],
    ) -> Drafts | None:
        """Drafts for the decoding ``sequences``; None where nothing is proposed to any."""
        if self.proposer is None:
            return None
        began = self.clock()
        try:
            self._forget(self.proposer, sequences)
            drafts = self._checked(self.proposer.propose(sequences, rows, wanted), wanted)
        except Exception as error:
            self._drop(error)
            return None
        finally:
            self._draft_s = self.clock() - began
        if any(s.grammar is not None for s in sequences):
            drafts = trim_to_grammar(drafts, sequences)
        return drafts if any(drafts.counts) else None

    def saw(self, advance: VerifiedStep) -> None:
        """Show the proposer what the model has computed."""
        if self.proposer is None:
            return
        try:
            self.proposer.saw(advance)
        except Exception as error:
            self._drop(error)

    def begins(self, plan: StepPlan) -> bool:
        """A step that decodes begins; whether ``end`` is to be called."""
        try:
            if not plan.draft_nodes and (self.proposer is None or self.lengths.passes_by()):
                return False
        except Exception as error:
            self._drop(error)
        self._began = self.clock()
        self._draft_s = 0.0
        return True

    def end(self, step: DecodedStep, counts: SpeculationCounters) -> None:
        """It has ended as ``step``."""
        proposed = () if step.drafts is None else tuple(step.drafts.counts)
        if self.proposer is not None:
            try:
                self.lengths.observe(self._outcome(self.proposer, step, proposed))
            except Exception as error:
                self._drop(error)
        if step.plan.draft_nodes:
            counts.step(proposed, [len(nodes) for nodes in step.accepted], self._draft_s)

    def _outcome(
        self, proposer: Proposer, step: DecodedStep, proposed: Sequence[int]
    ) -> StepOutcome:
        plan = step.plan
        return StepOutcome(
            sequences=plan.decode,
            proposed=proposed,
            accepted=step.accepted if proposed else (),
            rows=step.work.decode_rows + step.work.prompt_tokens,
            kv_tokens=step.work.decode_kv_tokens,
            draft_s=self._draft_s,
            step_s=self.clock() - self._began,
            passes=proposer.passes(max(proposed)) if proposed else 0,
            chunked=bool(plan.chunks),
            asked=plan.draft_nodes,
            caught_up_s=proposer.caught_up_s if plan.draft_nodes else 0.0,
        )

    def _forget(self, proposer: Proposer, sequences: Sequence[Running]) -> None:
        """Tell it which stays are over. Whoever is merely not asked about now keeps its own."""
        seatings = [s.row_lease for s in sequences]
        if seatings == self._seatings:
            return
        self._seatings = seatings
        self._stays.update(zip(seatings, sequences, strict=True))
        over = [i for i, s in self._stays.items() if s.row < 0 or s.row_lease != i]
        for seating in over:
            del self._stays[seating]
        if over:
            proposer.forget(sorted(over))

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
        log.warning("the %s proposer is dropped", self._name, exc_info=error)
        self.proposer = None
        self.lengths, self.taps = FixedDraftLength(0), ()
        self._stays.clear()
