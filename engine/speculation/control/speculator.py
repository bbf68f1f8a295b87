"""The speculation of one engine: its proposer, its draft length policy, and their failures.

A failure of the proposer or of the policy ends speculation and nothing else: both are dropped with
a reason, their memory is freed, and decoding continues.
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
from engine.speculation.control.draft_lengths import (
    DraftLengthPolicy,
    FixedDraftLength,
    StepOutcome,
)
from engine.speculation.device_span import DeviceSpan
from engine.speculation.drafts import ROOT, Drafts, first_path
from engine.speculation.proposers.proposer import (
    LayerTapProposer,
    Proposer,
    RecordedProposer,
    VerifiedStep,
)
from protocol.performance.step_model import StepWork

log = logging.getLogger("baton.engine")


class DecodedStep(NamedTuple):
    """A completed decoding step, as the stepper reports it."""

    plan: StepPlan
    drafts: Drafts | None
    accepted: Sequence[Sequence[int]]  # [B] indices of accepted draft nodes
    work: StepWork


class Speculator:
    """Owns a proposer and its draft length policy; the engine's loading code creates it. No other
    object may keep a reference to either, so that dropping them frees their weights and KV
    pools."""

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
        self.dropped = ""  # why the proposer was dropped
        # Layers whose inputs the proposer needs. Checked once: isinstance with a protocol takes
        # longer than the rest of a step without drafts.
        self.taps: Sequence[int] = (
            tuple(proposer.taps) if isinstance(proposer, LayerTapProposer) else ()
        )
        self._name = proposer.name
        self._vocab = vocab
        self._leases: list[int] = []  # row leases of the last ``propose``
        self._sequences: dict[int, Running] = {}  # by row lease, that the proposer may know
        self._began = 0.0
        self._proposing = DeviceSpan(clock)

    def use_policy(self, make: Callable[[Proposer], DraftLengthPolicy]) -> None:
        """Replace the policy by ``make(proposer)``, unless the proposer was dropped."""
        if self.proposer is None:
            return
        try:
            self.lengths = make(self.proposer)
        except Exception as error:
            self._drop(error)

    def record_graphs(self, progress: Callable[[float], None]) -> None:
        """Let the proposer record its passes as CUDA graphs, if it has any."""
        if isinstance(self.proposer, RecordedProposer):
            try:
                self.proposer.record_graphs(progress)
            except Exception as error:
                self._drop(error)

    def status(self) -> SpeculationStatus:
        try:
            predicted, measured = self.lengths.speedups()
        except Exception as error:
            self._drop(error)
            predicted = measured = 1.0
        return SpeculationStatus(self._name, self.dropped, predicted, measured)

    @property
    def needs_hidden_states(self) -> bool:
        """Whether the proposer needs the hidden states of the next step."""
        if self.proposer is None or not self.proposer.wants_hidden:
            return False
        try:
            return not self.lengths.idle
        except Exception as error:
            self._drop(error)
            return False

    @property
    def idle(self) -> bool:
        """Whether no drafts will be requested in the next steps."""
        if self.proposer is None:
            return True
        try:
            return self.lengths.idle
        except Exception as error:
            self._drop(error)
            return True

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Return the nodes to request for each of ``decoding`` [B]; empty: none for any."""
        if self.proposer is None or not decoding:
            return ()
        try:
            wanted = self.lengths.choose_lengths(decoding, chunk_tokens)
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
        """Return drafts for the decoding ``sequences`` [B]; None if there are none for any. rows:
        [B] int64, their rows in the state; wanted: [B] maximum number of nodes."""
        if self.proposer is None:
            return None
        try:
            self._proposing.begin(rows.device)
            self._forget_ended(self.proposer, sequences)
            drafts = self._checked(self.proposer.propose(sequences, rows, wanted), wanted)
        except Exception as error:
            self._drop(error)
            return None
        finally:
            self._proposing.end()
        if any(s.grammar is not None for s in sequences):
            drafts = trim_to_grammar(drafts, sequences)
        return drafts if any(drafts.counts) else None

    def observe(self, step: VerifiedStep) -> None:
        """Pass the model's hidden states of a step to the proposer."""
        if self.proposer is None:
            return
        try:
            self.proposer.observe(step)
        except Exception as error:
            self._drop(error)

    def begin_step(self, plan: StepPlan) -> bool:
        """Start the clock of a decoding step; return whether ``end_step`` must be called."""
        try:
            if not plan.draft_nodes and (self.proposer is None or self.lengths.skips_observation()):
                return False
        except Exception as error:
            self._drop(error)
        self._began = self.clock()
        self._proposing.clear()
        return True

    def end_step(self, step: DecodedStep, counts: SpeculationCounters) -> None:
        """Report the result of ``step`` to the length policy and add it to ``counts``."""
        proposed = () if step.drafts is None else tuple(step.drafts.counts)
        if self.proposer is not None:
            try:
                self.lengths.observe(self._outcome(self.proposer, step, proposed))
            except Exception as error:
                self._drop(error)
        if step.plan.draft_nodes:
            accepted = [len(nodes) for nodes in step.accepted]
            counts.step(proposed, accepted, self._proposing.seconds)

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
            draft_s=self._proposing.seconds,
            step_s=self.clock() - self._began,
            passes=proposer.passes(max(proposed)) if proposed else 0,
            chunked=bool(plan.chunks),
            asked=plan.draft_nodes,
            caught_up_s=proposer.caught_up_s if plan.draft_nodes else 0.0,
        )

    def _forget_ended(self, proposer: Proposer, sequences: Sequence[Running]) -> None:
        """Tell the proposer which row leases have ended; sequences only left out now stay known."""
        leases = [s.row_lease for s in sequences]
        if leases == self._leases:
            return
        self._leases = leases
        self._sequences.update(zip(leases, sequences, strict=True))
        over = [i for i, s in self._sequences.items() if s.row < 0 or s.row_lease != i]
        for lease in over:
            del self._sequences[lease]
        if over:
            proposer.forget(sorted(over))

    def _checked(self, drafts: Drafts, wanted: Sequence[int]) -> Drafts:
        """Return ``drafts`` with token ids clamped to the vocabulary (these are wrong drafts).
        Raises ValueError for drafts that cannot be verified in a step."""
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
        self._sequences.clear()


def trim_to_grammar(drafts: Drafts, sequences: Sequence[Running]) -> Drafts:
    """Trim the trees of sequences with a grammar to the part of their first path that it allows.
    The model cannot draw the tokens beyond it."""
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
