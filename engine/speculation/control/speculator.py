"""The speculation of one engine: its proposer, its draft length policy, and their failures.

A failure of the proposer or of the policy ends speculation and nothing else: both are dropped with
a reason, their memory is freed, and decoding continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

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
from engine.speculation.proposers.proposer import Proposer, VerifiedStep
from protocol.performance.speculation_profile import SpeculationProfile
from protocol.performance.step_model import StepWork

log = logging.getLogger("baton.engine")

R = TypeVar("R")


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
        self.taps = tuple(proposer.taps)
        self._name = proposer.name
        self._vocab = vocab
        self._leases: list[int] = []  # row leases of the last ``propose``
        self._sequences: dict[int, Running] = {}  # by row lease, that the proposer may know
        self._began = 0.0
        self._proposing = DeviceSpan(clock)

    def use_policy(self, make: Callable[[Proposer], DraftLengthPolicy]) -> None:
        """Replace the policy by ``make(proposer)``, unless the proposer was dropped."""

        def use() -> None:
            self.lengths = make(self._present)

        self._guarded(use, None)

    def record_graphs(self, progress: Callable[[float], None]) -> None:
        """Let the proposer record its passes as CUDA graphs, if it has any."""
        self._guarded(lambda: self._present.record_graphs(progress), None)

    def status(self) -> SpeculationStatus:
        predicted, measured = self._guarded(lambda: self.lengths.speedups(), (1.0, 1.0))
        return SpeculationStatus(self._name, self.dropped, predicted, measured)

    def profile(self) -> SpeculationProfile | None:
        """Return what drafts bring and cost; None while it is unknown, or without a proposer."""
        return self._guarded(lambda: self.lengths.profile(), None)

    @property
    def needs_hidden_states(self) -> bool:
        """Whether the proposer needs the hidden states of the next step."""
        return self._guarded(lambda: self._present.wants_hidden and not self.lengths.idle, False)

    @property
    def idle(self) -> bool:
        """Whether no drafts will be requested in the next steps."""
        return self._guarded(lambda: self.lengths.idle, True)

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        """Return the nodes to request for each of ``decoding`` [B]; empty: none for any."""

        def choose() -> Sequence[int]:
            wanted = self.lengths.choose_lengths(decoding, chunk_tokens)
            if not any(wanted):
                return ()
            if len(wanted) != len(decoding):
                raise ValueError(f"decided {len(wanted)} lengths for {len(decoding)} sequences")
            return [int(nodes) for nodes in wanted]

        return self._guarded(choose, ()) if decoding else ()

    def propose(
        self,
        sequences: Sequence[Running],
        rows: torch.Tensor,
        wanted: Sequence[int],
    ) -> Drafts | None:
        """Return drafts for the decoding ``sequences`` [B]; None if there are none for any. rows:
        [B] int64, their rows in the state; wanted: [B] maximum number of nodes."""

        def propose() -> Drafts:
            self._proposing.begin(rows.device)
            self._forget_ended(sequences)
            return self._checked(self._present.propose(sequences, rows, wanted), wanted)

        if self.proposer is None:
            return None
        drafts = self._guarded(propose, None)
        self._proposing.end()
        if drafts is not None and any(s.grammar is not None for s in sequences):
            drafts = trim_to_grammar(drafts, sequences)
        return drafts if drafts is not None and any(drafts.counts) else None

    def observe(self, step: VerifiedStep) -> None:
        """Pass the model's hidden states of a step to the proposer."""
        self._guarded(lambda: self._present.observe(step), None)

    def begin_step(self, plan: StepPlan) -> bool:
        """Start the clock of a decoding step; return whether ``end_step`` must be called."""
        if not plan.draft_nodes and self._guarded(lambda: self.lengths.skips_observation(), True):
            return False
        self._began = self.clock()
        self._proposing.clear()
        return True

    def end_step(self, step: DecodedStep, counts: SpeculationCounters) -> None:
        """Report the result of ``step`` to the length policy and add it to ``counts``."""
        proposed = () if step.drafts is None else tuple(step.drafts.counts)
        self._guarded(lambda: self.lengths.observe(self._outcome(step, proposed)), None)
        if step.plan.draft_nodes:
            accepted = [len(nodes) for nodes in step.accepted]
            counts.step(proposed, accepted, self._proposing.seconds)

    @property
    def drafting_left_s(self) -> float:
        """Seconds for which a GPU still computed the last drafts after they had been launched."""
        return self._proposing.left_s

    def _outcome(self, step: DecodedStep, proposed: Sequence[int]) -> StepOutcome:
        plan = step.plan
        return StepOutcome(
            sequences=plan.decode,
            proposed=proposed,
            accepted=step.accepted if proposed else (),
            kv_tokens=step.work.decode_kv_tokens,
            draft_s=self._proposing.seconds,
            step_s=self.clock() - self._began,
            passes=self._present.passes(max(proposed)) if proposed else 0,
            chunked=bool(plan.chunks),
            asked=plan.draft_nodes,
            caught_up_s=self._present.caught_up_s if plan.draft_nodes else 0.0,
        )

    def _forget_ended(self, sequences: Sequence[Running]) -> None:
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
            self._present.forget(sorted(over))

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

    @property
    def _present(self) -> Proposer:
        assert self.proposer is not None
        return self.proposer

    def _guarded(self, call: Callable[[], R], otherwise: R) -> R:
        """Return ``call()``, or ``otherwise`` without a proposer: after a failure, too. ``call``
        keeps no reference to the proposer, as the traceback of its failure is logged."""
        if self.proposer is None:
            return otherwise
        try:
            return call()
        except Exception as error:
            self._drop(error)
            return otherwise

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
