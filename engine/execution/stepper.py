"""One step: a plan into a batch, through the model, to tokens."""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from engine.batching.batcher import Batcher, RowState
from engine.batching.draft_layout import Layout, Shapes
from engine.execution.machine_costs import PassCost
from engine.execution.verifier import Drawn, Verifier
from engine.kv_cache.kv_pool import KVPool
from engine.model.decoder import Model
from engine.sampling.drawer import Drawer
from engine.sampling.logprobs import score_
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Phase, Sequence, trim
from engine.scheduling.step_policy import StepPlan
from engine.scheduling.step_time import StepTimer, Work
from engine.speculation.control.speculator import Ran, Speculator
from engine.speculation.drafts import Drafts
from engine.structured_output.compiler import refusal
from engine.structured_output.masks import Filling, Masker
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest
from protocol.requests import Finish, Logprobs

# MERGED engine.ending
# Whether a sequence ends with the token just drawn: a pure function. Torch-free.


def finish_reason(sequence: Sequence, token: int, eos: Set[int]) -> Finish:
    """``token`` is the last of ``sequence``, whose grammar has taken it; ``eos`` end a text.

    A grammar allows an end token only where the text may end, and nothing after it: so it ends the
    text under ``ignore_eos``, too. Where the model has none, a grammar that is through does.
    """
    grammar = sequence.grammar
    if token in eos and (grammar is not None or not sequence.request.sampling.ignore_eos):
        return Finish.STOP
    if token in sequence.stop_tokens:
        return Finish.STOP
    if grammar is not None and not eos and grammar.stopped:
        return Finish.STOP
    if len(sequence.tokens) >= sequence.request.length_limit:
        return Finish.LENGTH
    return Finish.NONE


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """One token of one sequence, whether it was the last, and what its request wants beside it."""

    handle: int
    token: int
    finish: Finish
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs] = []  # with the first token, where they were asked for


class Stepper:
    """Runs the steps of one engine, over what its scheduler has seated."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        scheduler: Scheduler,
        state: RowState,
        timer: StepTimer,
        cost: PassCost,
    ) -> None:
        self._model = model
        self._pool = pool
        self._scheduler = scheduler
        self._timer = timer
        self._cost = cost
        self.speculator: Speculator | None = None
        self._batcher = Batcher(state, model.dtype, model.config)
        self._verifier = Verifier(state, pool, Drawer(state.sampling))
        self._shapes = Shapes(model.device)
        self._masker = Masker()
        self._eos = frozenset(model.config.eos_token_ids)
        self._refused: list[tuple[int, InvalidRequest]] = []

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step; returns the tokens drawn in it."""
        speculator = self.speculator if plan.decode else None
        if speculator is not None and not speculator.begins(plan):
            speculator = None  # off: nothing needs to be known of this step
        drafts = self._propose(plan)
        layout = None if drafts is None else Layout.of(plan.decode, drafts, self._shapes)
        work = plan.work if drafts is None else plan.work.plus(Work(sum(drafts.counts)))
        self._timer.begin()
        drawing = list(plan.decode) + [s for s, n in plan.chunks if s.remaining == n]
        self._cost.add(self._scheduler.counters.done, plan, work, len(drawing))
        drawn = self._compute(plan, drawing, layout)
        self._timer.end(work, done=bool(drawing) or self._model.device.type == "cpu")
        manager = self._scheduler.manager
        for sequence, count in plan.chunks:
            sequence.computed += count
            sequence.commit(manager)
        out = [t for s, d in zip(drawing, drawn, strict=True) for t in self._advance(s, d)]
        for sequence in plan.decode if plan.wanted else ():
            trim(manager, sequence)
        if speculator is not None:
            accepted = [d.nodes for d in drawn[: len(plan.decode)]]
            ran = Ran(plan, drafts, accepted, work)
            speculator.end(ran, self._scheduler.counters.speculation)
        return out

    def _propose(self, plan: StepPlan) -> Drafts | None:
        if not plan.wanted or self.speculator is None:
            return None
        rows = torch.tensor([s.row for s in plan.decode], device=self._model.device)
        return self.speculator.propose(plan.decode, rows, plan.wanted)

    def _compute(
        self, plan: StepPlan, drawing: list[Sequence], layout: Layout | None
    ) -> list[Drawn]:
        """The model's pass; what each of ``drawing`` drew."""
        batch, rows = self._batcher.build(plan, layout)
        masks = self._fill(drawing, layout)  # while the model computes
        taps: dict[int, Tensor | None] = dict.fromkeys(
            self.speculator.taps if self.speculator else ()
        )
        hidden = self._model.hidden(batch, self._pool, taps)
        drew = batch.drawing(hidden)
        logits = self._model.logits(drew)
        drawn: list[Drawn] = []
        if drawing:
            barred = None if masks is None else masks.barred(logits.shape[1], logits.device)
            if layout is None:
                drawn, told = self._verifier.plain(drawing, logits, rows, barred)
            else:
                drawn, told = self._verifier.verify(drawing, logits, rows, barred, layout)
            if self.speculator is not None and self.speculator.sees:
                seen = [batch.drawing(x) for x in taps.values() if x is not None]
                self.speculator.saw(told.advance(drawing, rows, drew, seen))
        self._score(plan, hidden)
        return drawn

    def _fill(self, drawing: list[Sequence], layout: Layout | None) -> Filling | None:
        grammars = [s.grammar for s in drawing]
        if layout is None or not any(grammars):
            return self._masker.start(grammars)
        shape, tokens = layout.shape, layout.tokens.tolist()
        more = range(len(shape.owner), len(shape.owner) + len(drawing) - len(layout.lengths))
        starts = [*shape.starts.tolist(), *more]
        before = [start - index for index, start in enumerate(starts)]  # draft nodes
        drafts = [tokens[a:b] for a, b in pairwise([*before, len(tokens)])]
        return self._masker.start_verification(grammars, drafts, starts)

    def _score(self, plan: StepPlan, hidden: Tensor) -> None:
        """Log-probabilities of the prompts in this step whose requests want them."""
        start = len(hidden) - plan.work.prompt_tokens
        for sequence, count in plan.chunks:
            if sequence.scores:
                score_(sequence, hidden[start : start + count], self._model.logits)
            start += count

    def _advance(self, sequence: Sequence, drawn: Drawn) -> list[TokenOut]:
        """Append drawn tokens and move the sequence on, up to its end or its refusal."""
        scored = sequence.prompt_logprobs if sequence.scores else []
        decoding = sequence.phase is Phase.DECODE
        out: list[TokenOut] = []
        for token, logprobs in zip(drawn.tokens, drawn.logprobs, strict=True):
            grammar = sequence.grammar
            if grammar is not None and not grammar.advance(token):
                problem = refusal(grammar.problem or "no token fits")
                self._refused.append((sequence.handle, problem))
                self._scheduler.finish(sequence)
                return out
            if decoding:
                sequence.computed += 1
            sequence.tokens.append(token)
            finish = finish_reason(sequence, token, self._eos)
            out.append(TokenOut(sequence.handle, token, finish, logprobs, scored))
            scored = []
            if finish is not Finish.NONE:
                break
        if sequence.computed // BLOCK_TOKENS > sequence.committed:
            sequence.commit(self._scheduler.manager)
        if sequence.hold:
            self._scheduler.hold(sequence)
        elif out[-1].finish is not Finish.NONE:
            self._scheduler.finish(sequence)
        elif not decoding:
            self._scheduler.promote(sequence)
        return out

    def take_refused(self) -> list[tuple[int, InvalidRequest]]:
        """Handles of sequences whose grammar turned out to be of no use since the last call."""
        taken, self._refused = self._refused, []
        return taken
