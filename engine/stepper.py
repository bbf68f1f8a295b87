"""One step: a plan into a batch, through the model, to tokens."""

from __future__ import annotations

from itertools import zip_longest

import msgspec
import torch
from torch import Tensor

from engine.batcher import Batcher
from engine.ending import finish_reason
from engine.grammar.compiler import refusal
from engine.grammar.masks import Filling, Masker
from engine.kv_pool import KVPool
from engine.model import Model
from engine.sampling.draw import Drawer
from engine.sampling.prompt import score_
from engine.scheduler import Scheduler
from engine.sequence import Phase, Sequence
from engine.state import RowState
from engine.step_plan import StepPlan
from engine.step_time import StepTimer
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import InvalidRequest
from protocol.logprobs import Logprobs
from protocol.request import Finish


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
        self, model: Model, pool: KVPool, scheduler: Scheduler, state: RowState, timer: StepTimer
    ) -> None:
        self._model = model
        self._pool = pool
        self._scheduler = scheduler
        self._state = state
        self._timer = timer
        self._batcher = Batcher(state, model.dtype, model.config.windows)
        self._draw = Drawer(state.sampling)
        self._masker = Masker()
        self._eos = frozenset(model.config.eos_token_ids)
        self._refused: list[tuple[int, InvalidRequest]] = []

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step; returns the tokens drawn in it."""
        self._timer.begin()
        batch, rows = self._batcher.build(plan)
        drawing = list(plan.decode) + [s for s, n in plan.chunks if s.remaining == n]
        masks = self._masker.start([s.grammar for s in drawing])  # while the model computes
        hidden = self._model.hidden(batch, self._pool)
        logits = self._model.logits(batch.drawing(hidden))
        out = self._draw_tokens(drawing, logits, rows, masks) if drawing else []
        self._score(plan, hidden)
        self._timer.end(plan.work, done=bool(drawing) or self._model.device.type == "cpu")
        for sequence in plan.decode:
            sequence.computed += 1
        for sequence, count in plan.chunks:
            sequence.computed += count
            sequence.commit(self._scheduler.manager)
        advanced = (self._advance(s, t, p) for s, (t, p) in zip(drawing, out, strict=True))
        return [token for token in advanced if token is not None]

    def _score(self, plan: StepPlan, hidden: Tensor) -> None:
        """Log-probabilities of the prompts in this step whose requests want them."""
        start = len(plan.decode)
        for sequence, count in plan.chunks:
            if sequence.scores:
                score_(sequence, hidden[start : start + count], self._model.logits)
            start += count

    def _draw_tokens(
        self, drawing: list[Sequence], logits: Tensor, rows: Tensor, masks: Filling | None
    ) -> list[tuple[int, Logprobs | None]]:
        """Draw one token for each, in the order of the logits."""
        positions = self._state.length[rows]
        barred = None if masks is None else masks.barred(logits.shape[1], logits.device)
        tokens, logprobs = self._draw(drawing, logits, rows, positions, barred)
        self._state.last_token[rows] = tokens
        self._state.length[rows] += 1
        return list(zip_longest(tokens.tolist(), logprobs))

    def _advance(
        self, sequence: Sequence, token: int, logprobs: Logprobs | None
    ) -> TokenOut | None:
        """Append a drawn token and move the sequence on; None: it was refused instead."""
        grammar = sequence.grammar
        if grammar is not None and not grammar.advance(token):
            self._refused.append((sequence.handle, refusal(grammar.problem or "no token fits")))
            self._scheduler.finish(sequence)
            return None
        scored = sequence.prompt_logprobs if sequence.scores else []
        sequence.tokens.append(token)
        if sequence.computed % BLOCK_TOKENS == 0:
            sequence.commit(self._scheduler.manager)
        finish = finish_reason(sequence, token, self._eos)
        if sequence.hold:
            self._scheduler.hold(sequence)
        elif finish is not Finish.NONE:
            self._scheduler.finish(sequence)
        elif sequence.phase is Phase.PREFILL:
            self._scheduler.promote(sequence)
        return TokenOut(sequence.handle, token, finish, logprobs, scored)

    def take_refused(self) -> list[tuple[int, InvalidRequest]]:
        """Handles of sequences whose grammar turned out to be of no use since the last call."""
        taken, self._refused = self._refused, []
        return taken
