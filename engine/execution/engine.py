"""The engine: accepts sequences, plans and runs steps, and reads and writes the KV pool.

It runs in one thread and does no I/O. ``EngineServer`` calls it in the engine process; benchmarks
and tests call it directly.

The way of a KV page: ``Scheduler`` allocates pages when it admits a sequence, when a decoding
sequence needs one more, and for imports; ``drop``, the end of the sequence, or a preemption frees
them. ``plan`` allocates pages for draft nodes, and ``run`` frees those it does not need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from engine.batching.batcher import RowState
from engine.execution.pass_cost import pass_cost
from engine.execution.stepper import Stepper, TokenOut
from engine.ipc.settings import StepSettings
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.kv_format import Codec, KVPiece, Storage
from engine.kv_cache.kv_pool import make_pool
from engine.model.decoder import DecoderModel
from engine.sampling.sampling_table import SamplingTable, check_token_ids
from engine.scheduling.deadlines import DeadlineQueue
from engine.scheduling.draft_pages import allocate_draft_pages
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Phase, Sequence, blocks_for
from engine.scheduling.step_policy import StepBounds, StepPlan, StepPlanner, StepPolicy
from engine.scheduling.step_time import StepTimeModel, StepTimer
from engine.speculation.control.speculator import Speculator
from engine.structured_output.matcher import GrammarMatcher
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest, TransferFailed
from protocol.requests import Request


class EngineConfig(StepSettings, frozen=True, kw_only=True):
    """Configuration of one engine: the settings that it takes as they are, and the values that
    ``load_engine`` derives from the others, the model and the machine."""

    max_batch: int  # sequences in a step
    prefill_chunk: int  # prompt tokens in a step
    pages: int  # pages of the KV pool
    max_model_len: int  # tokens of one sequence
    kv_storage: Storage


def check_fits(request: Request, tokens: int, config: EngineConfig, vocab_size: int) -> None:
    """Raise InvalidRequest if this engine can never hold ``tokens`` tokens of the request."""
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
    check_token_ids(request.sampling, vocab_size)


class Engine:
    """One model with its KV pool, block manager and scheduler. Callers choose a handle for each
    sequence and use it in all later calls."""

    def __init__(
        self,
        model: DecoderModel,
        config: EngineConfig,
        policy: StepPolicy,
        clock: Callable[[], float] = time.perf_counter,
        core_clock: Callable[[], float] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.format = model.config.kv_format(
            config.kv_precision, config.kv_storage, model.dtype.itemsize
        )
        self.pool = make_pool(self.format, config.pages, model.dtype, model.device)
        self.manager = BlockManager(config.pages)
        cost = pass_cost(model.config, self.format, model.weights.bytes, model.dtype.itemsize)
        self.step_time = StepTimeModel(cost.pair_rows)
        self._timer = StepTimer(self.step_time, clock, core_clock)
        self._clock = clock
        bounds = StepBounds.from_settings(config)
        planner = StepPlanner(policy, config.prefill_chunk, bounds, self.step_time)
        self.scheduler = Scheduler(self.manager, config.max_batch, planner)
        self._deadlines = DeadlineQueue(self.scheduler.sequences)
        pages = blocks_for(config.max_model_len) + 1  # of one sequence
        vocab, eos = model.config.vocab_size, model.config.eos_token_ids
        length = pages * BLOCK_TOKENS
        rows = config.max_batch + 1  # the last one is for the padding of CUDA graphs
        table = SamplingTable(rows, length, vocab, eos, model.device)
        self.state = RowState(rows, pages, table)
        self.speculator: Speculator | None = None
        self._stepper = Stepper(model, self.pool, self.scheduler, self.state, self._timer, cost)

    def speculate(self, speculator: Speculator) -> None:
        """Draft tokens with ``speculator`` from the next step on."""
        self.speculator = self._stepper.speculator = speculator

    def record_graphs(self, progress: Callable[[float], None]) -> None:
        """Record decode steps, and steps with few prompt tokens, as CUDA graphs, where kernels
        compute the model. No sequence may be running. Steps with drafts are recorded if the engine
        drafts."""
        rows = self.config.prefill_chunk + self.config.max_batch
        invariant = self.config.batch_invariant
        self._stepper.record_graphs(progress, rows, batch_invariant=invariant)

    @property
    def steps_ahead(self) -> int:
        """Number of steps that were launched before the tokens of the step before were read."""
        return self._stepper.steps_ahead

    def run_empty_graph(self, rows: int) -> bool:
        """Run a recorded step of at least ``rows`` rows without any sequence, to measure how long
        it takes; return whether there is one."""
        return self._stepper.run_empty_graph(rows)

    @property
    def rows_computed(self) -> Callable[[int, int, int], int] | None:
        """A function that returns the rows that a decode step computes, by its sequences, the most
        drafts of one, and the tokens of all contexts; None where steps are not recorded, and have
        the rows of their sequences and drafts alone."""
        return self._stepper.rows_computed

    def take_role(self, policy: StepPolicy, *, drafts: bool) -> None:
        """Plan with ``policy`` from the next step on. Without ``drafts`` the speculator pauses and
        keeps its state."""
        self.scheduler.planner.policy = policy
        self._stepper.speculator = self.speculator if drafts else None

    # ---- requests ---------------------------------------------------------------------------

    def generate(
        self,
        handle: int,
        request: Request,
        grammar: GrammarMatcher | None = None,
        expected_tokens: int = 0,
    ) -> None:
        """Compute the context here, then decode. ``grammar`` is a matcher at its start, and
        ``expected_tokens`` how much of the context is likely to be computed; 0: all of it."""
        self._check(request, request.length_limit)
        self._queue_prompt(handle, request, grammar, expected_tokens)

    def prefill(
        self,
        handle: int,
        request: Request,
        grammar: GrammarMatcher | None = None,
        expected_tokens: int = 0,
    ) -> None:
        """Compute the context, draw one token, and hold the pages until ``drop``."""
        self._check(request, len(request.context) + 1)
        self._queue_prompt(handle, request, grammar, expected_tokens, hold=True)

    def _queue_prompt(
        self,
        handle: int,
        request: Request,
        grammar: GrammarMatcher | None,
        expected_tokens: int,
        *,
        hold: bool = False,
    ) -> None:
        _resume_grammar(request, grammar)
        sequence = self._new_sequence(handle, request, Phase.WAITING, grammar, hold=hold)
        sequence.expected_tokens = expected_tokens
        self.scheduler.add(sequence)

    def receive(self, handle: int, request: Request, grammar: GrammarMatcher | None = None) -> int:
        """Expect the context's KV from another worker; return how many tokens are cached here."""
        self._check(request, request.length_limit)
        _resume_grammar(request, grammar)
        sequence = self._new_sequence(handle, request, Phase.LOOKED_UP, grammar)
        return self.scheduler.look_up(sequence)

    def export(self, handle: int, request: Request) -> int:
        """Hold the cached leading full blocks of the context until ``drop``; return the count."""
        self._check(request, len(request.context))
        sequence = self._new_sequence(handle, request, Phase.HELD)
        self.scheduler.export(sequence)
        return len(sequence.pages)

    def import_(self, handle: int, request: Request) -> tuple[int, int]:
        """Expect the missing full blocks of the context from another worker, for the prefix cache
        alone. Return the number of cached leading blocks, and of blocks with a page. The pages are
        freed by ``end_import`` or ``drop``, or earlier when another sequence needs one."""
        self._check(request, len(request.context))
        return self.scheduler.import_(self._new_sequence(handle, request, Phase.IMPORTING))

    def _new_sequence(
        self,
        handle: int,
        request: Request,
        phase: Phase,
        grammar: GrammarMatcher | None = None,
        *,
        hold: bool = False,
    ) -> Sequence:
        sequence = Sequence(handle, request, phase, hold, grammar, self._clock())
        self._deadlines.add(sequence)
        return sequence

    def end_import(self, handle: int) -> None:
        """End an import and keep its completely received blocks in the prefix cache."""
        self.scheduler.end_import(self.scheduler.sequences[handle])

    def reserve(self, handle: int) -> None:
        """Queue a sequence from ``receive`` for all its pages, including the cached ones."""
        self.scheduler.reserve(self.scheduler.sequences[handle])

    def join(self, handle: int, token: int) -> None:
        """Decode from ``token`` on, after every missing block was written. If the grammar does not
        allow the token, drop the sequence and raise InvalidRequest."""
        sequence = self.scheduler.sequences[handle]
        if sequence.grammar is not None and not sequence.grammar.accept((token,)):
            self.drop(handle)
            raise _grammar_mismatch((token,))
        self.scheduler.join(sequence, token)

    def drop(self, handle: int) -> None:
        """Forget a sequence in any phase and free its pages. Unknown handles are ignored."""
        sequence = self.scheduler.sequences.get(handle)
        if sequence is not None:
            self.scheduler.finish(sequence)

    def take_expired(self) -> list[int]:
        """Return the handles of the sequences whose deadline has passed, and for which a step would
        compute something; the caller drops them."""
        return self._deadlines.take_expired(self._clock())

    # ---- KV in and out ----------------------------------------------------------------------

    def computed_blocks(self, handle: int) -> int:
        """Return how many leading blocks of the context may be read: the computed full blocks, and
        the last one when the whole context is computed."""
        sequence = self.scheduler.sequences[handle]
        context = len(sequence.request.context)
        if sequence.computed >= context:
            return blocks_for(context)
        return sequence.computed // BLOCK_TOKENS

    def pages_of(self, handle: int, piece: KVPiece) -> list[int]:
        """Return the pages of a piece's blocks, in order."""
        return self.scheduler.sequences[handle].pages[piece.block : piece.block + piece.blocks]

    def read(self, handle: int, piece: KVPiece, out: Tensor, codec: Codec = Codec.RAW) -> int:
        """Copy computed KV of a sequence into ``out`` [>= bytes] uint8; return the bytes."""
        return self.pool.read(piece, self.pages_of(handle, piece), out, codec)

    def write(self, handle: int, piece: KVPiece, data: Tensor, codec: Codec = Codec.RAW) -> None:
        """Write received KV, ``data`` [bytes] uint8, to the reserved pages of a sequence. If the
        pool rejects the data, drop the sequence and raise TransferFailed. The copy thread of an
        engine process writes through the sequence's lease instead."""
        sequence = self.scheduler.sequences[handle]
        lease = sequence.lease
        assert lease is not None and sequence.phase in (Phase.IMPORTING, Phase.RECEIVING)
        try:
            with lease.pages(piece) as pages:
                assert pages is not None
                self.pool.write(piece, pages, data, codec)
                lease.record(piece, self.format)
        except TransferFailed:
            self.reject_write(handle)
            raise

    def reject_write(self, handle: int) -> None:
        """Drop a sequence whose received KV is invalid, or that is no more. An import keeps the
        blocks before it."""
        sequence = self.scheduler.sequences.get(handle)
        if sequence is not None and sequence.phase is Phase.IMPORTING:
            self.end_import(handle)
        else:
            self.drop(handle)

    # ---- one step ---------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Return the plan of the next step, which is false if there is nothing to compute."""
        if (ahead := self._stepper.ahead_plan()) is not None:
            return ahead
        plan = self.scheduler.plan()
        if not plan:
            self._timer.idle()
        elif self._stepper.speculator is not None:
            return self._with_drafts(plan, self._stepper.speculator)
        return plan

    def _with_drafts(self, plan: StepPlan, speculator: Speculator) -> StepPlan:
        """Add the draft nodes that the speculator wants, with pages that ``run`` trims."""
        if not self._stepper.takes_drafts(plan):
            return plan
        wanted = speculator.choose_lengths(plan.decode, plan.work.prompt_tokens)
        fitting = allocate_draft_pages(self.manager, plan.decode, wanted) if wanted else ()
        return replace(plan, draft_nodes=fitting) if any(fitting) else plan

    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step and return the tokens drawn in it."""
        return self._stepper.run(plan)

    def take_refused(self) -> list[tuple[int, InvalidRequest]]:
        """Return and clear the handles of sequences whose grammar failed, each with the error."""
        return self._stepper.take_refused()

    def _check(self, request: Request, tokens: int) -> None:
        check_fits(request, tokens, self.config, self.model.config.vocab_size)


def _resume_grammar(request: Request, grammar: GrammarMatcher | None) -> None:
    """Advance the grammar over the emitted tokens. Raise InvalidRequest if it forbids them."""
    assert (grammar is None) == (not request.sampling.grammar)
    if grammar is not None and not grammar.accept(request.emitted):
        raise _grammar_mismatch(request.emitted)


def _grammar_mismatch(tokens: tuple[int, ...]) -> InvalidRequest:
    return InvalidRequest(
        f"the {len(tokens)} tokens so far do not match the grammar", "response_format"
    )
