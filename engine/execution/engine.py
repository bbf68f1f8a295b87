"""The engine: plan a step, run it, read and write the pool. One thread, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
from torch import Tensor

from engine.batching.batcher import RowState
from engine.execution.machine_costs import pass_cost
from engine.execution.stepper import Stepper, TokenOut
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.kv_format import Codec, Piece, Precision, Storage
from engine.kv_cache.kv_pool import make_pool
from engine.model.decoder import Model
from engine.sampling.sampling_table import SamplingTable, check_tokens
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.scheduling.sequence import Phase, Sequence, blocks_for, extend
from engine.scheduling.step_policy import Policy, StepPlanner
from engine.scheduling.step_time import StepTimeModel, StepTimer
from engine.speculation.control.speculator import Speculator
from engine.structured_output.matcher import Matcher
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest, TransferFailed
from protocol.requests import Request

# MERGED engine.limits
# Sizes of one engine, and what of a request can never fit them.


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one engine."""

    pages: int  # pages of the KV pool
    max_batch: int = 64  # sequences that run at once
    chunk: int = 512  # most prompt tokens in a step
    max_model_len: int = 4096  # tokens of one sequence
    step_budget_ms: float | None = None  # of a step with decoding; None: the policy's own, 0: none
    kv_precision: Precision = "exact"
    kv_storage: Storage = "wide"


def check(request: Request, tokens: int, config: EngineConfig, vocab_size: int) -> None:
    """Raises InvalidRequest when ``tokens`` tokens of this request can never be held here."""
    if tokens > config.max_model_len:
        raise InvalidRequest(
            f"{len(request.prompt)} prompt tokens and max_tokens={request.sampling.max_tokens}"
            f" make {tokens}, over the model's {config.max_model_len}",
            "max_tokens",
            "context_length_exceeded",
        )
    if blocks_for(tokens) > config.pages:
        raise InvalidRequest(
            f"{len(request.prompt)} prompt tokens and max_tokens={request.sampling.max_tokens} need"
            f" KV for {tokens} tokens; a worker's pool holds {config.pages * BLOCK_TOKENS}",
            "prompt",
            "context_length_exceeded",
        )
    if max(request.context) >= vocab_size:
        raise InvalidRequest(
            f"token id {max(request.context)} is outside the vocabulary of {vocab_size}", "prompt"
        )
    check_tokens(request.sampling, vocab_size)


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
        self.speculator: Speculator | None = None
        cost = pass_cost(model.config, self.format, model.weights.bytes, model.dtype.itemsize)
        self._stepper = Stepper(model, self.pool, self.scheduler, self.state, self._timer, cost)

    def speculate(self, speculator: Speculator) -> None:
        """Propose tokens from the next step on."""
        self.speculator = self._stepper.speculator = speculator

    def take_role(self, policy: Policy, *, drafts: bool) -> None:
        """Plan by ``policy`` from the next step on. Without ``drafts`` the proposer rests; what it
        knows stays."""
        self.scheduler.planner.policy = policy
        self._stepper.speculator = self.speculator if drafts else None

    # ---- requests ---------------------------------------------------------------------------

    def _check(self, request: Request, tokens: int) -> None:
        check(request, tokens, self.config, self.model.config.vocab_size)

    def generate(self, handle: int, request: Request, grammar: Matcher | None = None) -> None:
        """Compute the context here, then decode. ``grammar``: the request's, at its start."""
        self._check(request, request.length_limit)
        _begin(request, grammar)
        self.scheduler.add(Sequence(handle, request, Phase.WAITING, grammar=grammar))

    def prefill(self, handle: int, request: Request, grammar: Matcher | None = None) -> None:
        """Compute the context, emit one token, and keep the pages until ``drop``."""
        self._check(request, len(request.context) + 1)
        _begin(request, grammar)
        self.scheduler.add(Sequence(handle, request, Phase.WAITING, hold=True, grammar=grammar))

    def receive(self, handle: int, request: Request, grammar: Matcher | None = None) -> int:
        """Expect the context's KV from elsewhere; returns the tokens that are cached here."""
        self._check(request, request.length_limit)
        _begin(request, grammar)
        sequence = Sequence(handle, request, Phase.LOOKED_UP, grammar=grammar)
        return self.scheduler.look_up(sequence)

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
        """Every missing block is written: decode on from ``token``. Raises InvalidRequest where the
        grammar does not have it; the sequence is gone then."""
        sequence = self.scheduler.sequences[handle]
        if sequence.grammar is not None and not sequence.grammar.accept((token,)):
            self.drop(handle)
            raise _unfit((token,))
        self.scheduler.join(sequence, token)

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
        elif self._stepper.speculator is not None:
            return self._with_drafts(plan, self._stepper.speculator)
        return plan

    def _with_drafts(self, plan: StepPlan, speculator: Speculator) -> StepPlan:
        """``plan`` with what may be proposed, on pages of its own."""
        wanted = speculator.wanted(plan.decode, plan.work.prompt_tokens)
        fitting = extend(self.manager, plan.decode, wanted) if wanted else ()
        return replace(plan, wanted=fitting) if any(fitting) else plan

    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step; returns the tokens drawn in it."""
        return self._stepper.run(plan)

    def take_refused(self) -> list[tuple[int, InvalidRequest]]:
        """Handles of sequences whose grammar turned out to be of no use since the last call."""
        return self._stepper.take_refused()


def _begin(request: Request, grammar: Matcher | None) -> None:
    """Bring a grammar to where the request stands. Raises InvalidRequest."""
    assert (grammar is None) == (not request.sampling.grammar)
    if grammar is not None and not grammar.accept(request.emitted):
        raise _unfit(request.emitted)


def _unfit(tokens: tuple[int, ...]) -> InvalidRequest:
    return InvalidRequest(
        f"the {len(tokens)} tokens so far are not what the grammar allows", "response_format"
    )
