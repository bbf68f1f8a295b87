"""The engine: plan a step, run it, read and write the pool. One thread, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import zip_longest

import msgspec
import torch
from torch import Tensor

from engine.batcher import Batcher
from engine.block_manager import BlockManager
from engine.kv_format import Codec
from engine.kv_pool import make_pool
from engine.limits import EngineConfig as EngineConfig
from engine.limits import check
from engine.model import Model
from engine.pieces import Piece
from engine.policy import Policy
from engine.sampling.draw import Drawer
from engine.sampling.table import SamplingTable
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Phase, Sequence, blocks_for
from engine.state import RowState
from engine.step_plan import StepPlanner
from engine.step_time import StepTimeModel, StepTimer
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import TransferFailed
from protocol.logprobs import Logprobs
from protocol.request import Finish, Request


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """One token of one sequence, whether it was the last, and what its request wants beside it."""

    handle: int
    token: int
    finish: Finish
    logprobs: Logprobs | None = None


class Engine:
    """Sequences in, tokens out. A sequence is addressed by the caller's handle."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        policy: Policy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.config = config
        self.format = model.config.kv_format(
            config.kv_precision, config.kv_storage, model.dtype.itemsize
        )
        self.pool = make_pool(self.format, config.pages, model.dtype, model.device)
        self.manager = BlockManager(config.pages)
        self.step_time = StepTimeModel()
        self._timer = StepTimer(self.step_time, clock)
        budget_s = None if config.step_budget_ms is None else config.step_budget_ms / 1e3
        planner = StepPlanner(policy, config.chunk, budget_s, self.step_time)
        self.scheduler = Scheduler(self.manager, config.max_batch, planner)
        pages = blocks_for(config.max_model_len) + 1  # of one sequence
        vocab, eos = model.config.vocab_size, model.config.eos_token_ids
        length = pages * BLOCK_TOKENS
        table = SamplingTable(config.max_batch, length, vocab, eos, model.device)
        self.state = RowState(config.max_batch, pages, table)
        self._draw = Drawer(table)
        self._batcher = Batcher(self.state, model.dtype, model.config.windows)
        self._eos = frozenset(model.config.eos_token_ids)

    # ---- requests ---------------------------------------------------------------------------

    def _check(self, request: Request, tokens: int) -> None:
        check(request, tokens, self.config, self.model.config.vocab_size)

    def generate(self, handle: int, request: Request) -> None:
        """Compute the context here, then decode."""
        self._check(request, request.length_limit)
        self.scheduler.add(Sequence(handle, request, Phase.WAITING))

    def prefill(self, handle: int, request: Request) -> None:
        """Compute the context, emit one token, and keep the pages until ``drop``."""
        self._check(request, len(request.context) + 1)
        self.scheduler.add(Sequence(handle, request, Phase.WAITING, hold=True))

    def receive(self, handle: int, request: Request) -> int:
        """Expect the context's KV from elsewhere; returns the tokens that are cached here."""
        self._check(request, request.length_limit)
        return self.scheduler.look_up(Sequence(handle, request, Phase.LOOKED_UP))

    def export(self, handle: int, request: Request) -> int:
        """Hold the context's full blocks that are cached until ``drop``; returns their number."""
        self._check(request, len(request.context))
        sequence = Sequence(handle, request, Phase.HELD)
        self.scheduler.export(sequence)
        return len(sequence.pages)

    def import_(self, handle: int, request: Request) -> tuple[int, int]:
        """Expect the context's missing full blocks from elsewhere, for the cache alone. Returns the
        leading blocks that are cached, and those that are or have a page."""
        self._check(request, len(request.context))
        return self.scheduler.import_(Sequence(handle, request, Phase.IMPORTING))

    def adopt(self, handle: int) -> None:
        """End an import; what has come whole is cached."""
        self.scheduler.adopt(self.scheduler.sequences[handle])

    def reserve(self, handle: int) -> None:
        """Queue for the pages of a received sequence, the cached ones included."""
        self.scheduler.reserve(self.scheduler.sequences[handle])

    def join(self, handle: int, token: int) -> None:
        """Every missing block is written: decode on from ``token``."""
        self.scheduler.join(self.scheduler.sequences[handle], token)

    def drop(self, handle: int) -> None:
        """Forget a sequence, wherever it is. Unknown handles are none of our business."""
        sequence = self.scheduler.sequences.get(handle)
        if sequence is not None:
            self.scheduler.finish(sequence)

    # ---- KV in and out ----------------------------------------------------------------------

    def computed_blocks(self, handle: int) -> int:
        """Leading blocks of the context whose KV may be read: full ones, and the last one when the
        whole context is computed."""
        sequence = self.scheduler.sequences[handle]
        context = len(sequence.request.context)
        if sequence.computed >= context:
            return blocks_for(context)
        return sequence.computed // BLOCK_TOKENS

    def read(self, handle: int, piece: Piece, out: Tensor, codec: Codec = Codec.RAW) -> int:
        """Copy computed KV of a sequence into ``out`` (uint8); returns the bytes."""
        pages = self.scheduler.sequences[handle].pages[piece.block : piece.block + piece.blocks]
        return self.pool.read(piece, pages, out, codec)

    def write(self, handle: int, piece: Piece, data: Tensor, codec: Codec = Codec.RAW) -> None:
        """Scatter received KV into the reserved pages of a sequence; pieces come in order. Raises
        TransferFailed; the sequence is then of no use, and gone."""
        sequence = self.scheduler.sequences[handle]
        imports = sequence.phase is Phase.IMPORTING
        assert imports or sequence.phase is Phase.RECEIVING
        assert piece.block * BLOCK_TOKENS >= sequence.cached
        end = piece.block + piece.blocks
        try:
            self.pool.write(piece, sequence.pages[piece.block : end], data, codec)
        except TransferFailed:
            self.adopt(handle) if imports else self.drop(handle)
            raise
        if imports and piece.layer + piece.layers == self.format.layers:
            sequence.computed = end * BLOCK_TOKENS

    # ---- one step ---------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        if not plan:
            self._timer.idle()
        return plan

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step; returns the tokens drawn in it."""
        self._timer.begin()
        batch, rows = self._batcher.build(plan)
        logits = self.model.forward(batch, self.pool)
        drawing = list(plan.decode) + [s for s, n in plan.chunks if s.remaining == n]
        out = self._draw_tokens(drawing, logits, rows) if drawing else []
        self._timer.end(plan.work, done=bool(drawing) or self.model.device.type == "cpu")
        for sequence in plan.decode:
            sequence.computed += 1
        for sequence, count in plan.chunks:
            sequence.computed += count
            sequence.commit(self.manager)
        return [self._advance(s, t, p) for s, (t, p) in zip(drawing, out, strict=True)]

    def _draw_tokens(
        self, drawing: list[Sequence], logits: Tensor, rows: Tensor
    ) -> list[tuple[int, Logprobs | None]]:
        """Draw one token for each, in the order of the logits."""
        positions = self.state.length[rows]
        tokens, logprobs = self._draw(drawing, logits, rows, positions)
        self.state.last_token[rows] = tokens
        self.state.length[rows] += 1
        return list(zip_longest(tokens.tolist(), logprobs))

    def _advance(self, sequence: Sequence, token: int, logprobs: Logprobs | None) -> TokenOut:
        """Append a drawn token and move the sequence on."""
        sequence.tokens.append(token)
        if sequence.computed % BLOCK_TOKENS == 0:
            sequence.commit(self.manager)
        finish = self._finish_reason(sequence, token)
        if sequence.hold:
            self.scheduler.hold(sequence)
        elif finish is not Finish.NONE:
            self.scheduler.finish(sequence)
        elif sequence.phase is Phase.PREFILL:
            self.scheduler.promote(sequence)
        return TokenOut(sequence.handle, token, finish, logprobs)

    def _finish_reason(self, sequence: Sequence, token: int) -> Finish:
        sampling = sequence.request.sampling
        if token in self._eos and not sampling.ignore_eos:
            return Finish.STOP
        if token in sequence.stop_tokens:
            return Finish.STOP
        if len(sequence.tokens) >= sequence.request.length_limit:
            return Finish.LENGTH
        return Finish.NONE
