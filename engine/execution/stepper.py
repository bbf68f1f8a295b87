"""The stepper: runs one planned step from drafts and batch through the model to tokens.

The engine creates one and calls ``run`` for each plan. Whatever a step draws is applied to the
sequences here; the scheduler is told when one is done, held, or decodes from now on.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from engine.batching.batcher import Batcher, RowState
from engine.batching.draft_layout import DraftLayout, DraftShapeCache
from engine.execution.model_pass import DecodeInputs, ModelPass, StepAhead
from engine.execution.pass_cost import PassCost
from engine.execution.verifier import DrawnOnDevice, DrawnTokens, Verifier
from engine.kv_cache.kv_pool import KVPool
from engine.model.decoder import DecoderModel
from engine.sampling.logprobs import add_prompt_logprobs
from engine.sampling.sampler import Sampler
from engine.scheduling.draft_pages import allocate_page_ahead, trim_draft_pages
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Phase, Sequence
from engine.scheduling.step_policy import StepPlan
from engine.scheduling.step_time import StepTimer
from engine.speculation.control.speculator import DecodedStep, Speculator
from engine.speculation.drafts import Drafts
from engine.structured_output.compiler import invalid_grammar
from engine.structured_output.masks import MaskFiller, PendingMasks
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest
from protocol.performance.step_model import StepWork
from protocol.requests import Finish, Logprobs

if TYPE_CHECKING:
    from engine.batching.paged_batcher import PagedBatcher
    from engine.execution.decode_graphs import DecodeGraphs
    from engine.execution.device_verifier import DeviceVerifier
    from engine.execution.prompt_graphs import PromptGraphs
    from engine.kernels.recording import GraphSize, PromptGraphSize


def finish_reason(sequence: Sequence, token: int, eos: Set[int]) -> Finish:
    """Return why ``sequence`` ends with ``token``, its last one, or Finish.NONE. Its grammar has
    accepted the token; ``eos`` are the model's end tokens.

    A grammar allows an end token only where the text may end, and no token after it, so an end
    token finishes the text also under ``ignore_eos``. For a model without end tokens, the text
    finishes when the grammar has stopped.
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
    """One token drawn for a sequence, with the log-probabilities that its request asked for."""

    handle: int
    token: int
    finish: Finish  # whether and why the sequence ends with this token
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs] = []  # with the first token


def make_batcher(model: DecoderModel, state: RowState) -> Batcher | PagedBatcher:
    """Return the batcher for the layers of ``model``."""
    if not model.uses_kernels:
        return Batcher(state, model.dtype, model.config)
    # Only an installation for GPUs has Triton, which this module imports.
    from engine.batching.paged_batcher import PagedBatcher

    return PagedBatcher(state, model.dtype, model.config, masks=not model.prompts_by_varlen)


def make_device_verifier(
    model: DecoderModel, state: RowState, pool: KVPool
) -> DeviceVerifier | None:
    """Return what draws on the device; None where no kernels run."""
    if not model.uses_kernels:
        return None
    from engine.execution.device_verifier import DeviceVerifier

    return DeviceVerifier(state, pool)


class Stepper:
    """Runs the steps of one engine. ``speculator`` is None while no tokens are drafted.
    ``steps_ahead`` counts the steps that were launched before the last one was read."""

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        scheduler: Scheduler,
        state: RowState,
        timer: StepTimer,
        cost: PassCost,
    ) -> None:
        self._model = model
        self._pool = pool
        self._state = state
        self._scheduler = scheduler
        self._timer = timer
        self._cost = cost
        self.speculator: Speculator | None = None
        self._batcher = make_batcher(model, state)
        self._sampler = Sampler(state.sampling)
        self._verifier = Verifier(state, pool, self._sampler)
        self._device = make_device_verifier(model, state, pool)
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._ahead: StepAhead | None = None
        self.steps_ahead = 0
        self._shapes = DraftShapeCache(model.device)
        self._masker = MaskFiller(pinned=model.device.type == "cuda")
        self._eos = frozenset(model.config.eos_token_ids)
        self._refused: list[tuple[int, InvalidRequest]] = []

    def record_graphs(
        self, progress: Callable[[float], None], most_rows: int, *, batch_invariant: bool = False
    ) -> None:
        """Record steps, and run them in graphs from now on where one fits. No step of this engine
        has more than ``most_rows`` rows. Steps with drafts are recorded if there is a speculator,
        steps with prompts unless ``batch_invariant``. On a CPU nothing is recorded."""
        if self._device is None or not self._model.can_be_recorded:
            return
        from engine.execution import decode_graphs, prompt_graphs

        taps = () if self.speculator is None else self.speculator.taps
        graphs = decode_graphs.DecodeGraphs(
            *(self._model, self._pool, self._state, self._device, taps),
            batch_invariant=batch_invariant,
        )
        if not batch_invariant:  # the rows of its products differ from step to step
            prompts = prompt_graphs.PromptGraphs(
                *(self._model, self._pool, self._state, graphs.recorder, taps, most_rows)
            )
            prompts.record(progress)  # first: the others find room in the pool of these
            self._prompt_graphs = prompts
        rows = decode_graphs.ROWS[:1] if self.speculator is None else decode_graphs.ROWS
        graphs.record(rows, progress)
        self._graphs = graphs
        if self.speculator is not None:
            self.speculator.record_graphs(progress)

    def takes_drafts(self, plan: StepPlan) -> bool:
        """Return whether drafts may be added to ``plan``: not where a graph computes prompts."""
        return self._prompt_graph_size(plan) is None

    def _prompt_graph_size(self, plan: StepPlan) -> PromptGraphSize | None:
        if self._prompt_graphs is None or not plan.chunks:
            return None
        return self._prompt_graphs.size_for(plan)

    def run_empty_graph(self, rows: int) -> bool:
        """Run a recorded step of at least ``rows`` rows without any sequence; return whether there
        is one."""
        return self._graphs is not None and self._graphs.run_empty(rows)

    @property
    def rows_computed(self) -> Callable[[int, int, int], int] | None:
        """What ``Engine.rows_computed`` returns."""
        return None if self._graphs is None else self._graphs.rows_computed

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[TokenOut]:
        """Run a planned step and return the tokens drawn in it. Draft pages that the plan allocated
        are freed at its end."""
        speculator = self.speculator if plan.decode else None
        if speculator is not None and not speculator.begin_step(plan):
            speculator = None  # it does not measure this step
        drafts = self._propose(plan)
        layout = None if drafts is None else DraftLayout.of(plan.decode, drafts, self._shapes)
        work = plan.work if drafts is None else plan.work.plus(StepWork(sum(drafts.counts)))
        self._timer.begin(ahead=self._ahead is not None)
        drawing = list(plan.decode) + [s for s, n in plan.chunks if s.remaining == n]
        self._cost.add(self._scheduler.counters.done, plan, work, len(drawing))
        drawn = self._compute(plan, drawing, layout)
        done = bool(drawing) or self._model.device.type == "cpu"
        drafting = self.speculator if plan.draft_nodes else None
        self._timer.end(
            work, done=done, before_s=0.0 if drafting is None else drafting.drafting_left_s
        )
        manager = self._scheduler.manager
        for sequence, count in plan.chunks:
            sequence.computed += count
            sequence.commit(manager)
        out = [t for s, d in zip(drawing, drawn, strict=True) for t in self._advance(s, d)]
        for sequence in plan.decode if plan.draft_nodes else ():
            trim_draft_pages(manager, sequence)
        if speculator is not None:
            accepted = [d.nodes for d in drawn[: len(plan.decode)]]
            ran = DecodedStep(plan, drafts, accepted, work)
            speculator.end_step(ran, self._scheduler.counters.speculation)
        return out

    def _propose(self, plan: StepPlan) -> Drafts | None:
        if not plan.draft_nodes or self.speculator is None:
            return None
        rows = upload([s.row for s in plan.decode], self._model.device)
        return self.speculator.propose(plan.decode, rows, plan.draft_nodes)

    def _compute(
        self, plan: StepPlan, drawing: list[Sequence], layout: DraftLayout | None
    ) -> list[DrawnTokens]:
        """Run the model, and return what each of ``drawing`` drew."""
        if self._ahead is not None:
            return self._read_ahead(self._ahead, plan, drawing)
        passed = self._replay(plan, layout) or self._run_model(plan, layout)
        drawn: list[DrawnTokens] = []
        if passed.tokens is not None:
            self._launch_ahead(plan, drawing)
        if drawing:
            drawn, on_device = self._draw(drawing, layout, passed)
            if self.speculator is not None and self.speculator.needs_hidden_states:
                seen = on_device.advance(drawing, passed.rows, passed.last_hidden, passed.taps)
                self.speculator.observe(seen)
        self._add_prompt_logprobs(plan, passed.hidden)
        return drawn

    def _replay(self, plan: StepPlan, layout: DraftLayout | None) -> ModelPass | None:
        """Run the model in a recorded graph, if there is one for the step."""
        if layout is None and (prompts := self._prompt_graph_size(plan)) is not None:
            assert self._prompt_graphs is not None
            return self._prompt_graphs.run(plan, prompts)
        if self._graphs is None or plan.chunks:
            return None
        size = self._graphs.size_for(plan.decode, layout)
        return None if size is None else self._run_graph(size, plan.decode, layout)

    def _run_graph(
        self, size: GraphSize, decode: Seq[Sequence], layout: DraftLayout | None
    ) -> ModelPass:
        assert self._graphs is not None and self._device is not None
        out = self._graphs.run(size, decode, layout)
        rows = out.rows.state_row[: len(decode)]
        inputs = DecodeInputs(out.rows, out.inputs.positions, out.drafts)
        tokens = self._device.fetch(len(decode)) if layout is None else None
        return ModelPass(rows, out.hidden, out.hidden, out.logits, out.taps, inputs, tokens)

    # ---- running ahead ----------------------------------------------------------------------

    def ahead_plan(self) -> StepPlan | None:
        """Return the plan of the step that was launched before the last one was read: those of its
        sequences that still decode. None: there is no such step."""
        if self._ahead is None:
            return None
        pairs = zip(self._ahead.sequences, self._ahead.leases, strict=True)
        going = [s for s, lease in pairs if s.row >= 0 and s.row_lease == lease]
        if not going:
            self._ahead = None  # what it draws is of no use
            return None
        return self._scheduler.planner.plan(going, ())

    def _read_ahead(
        self, ahead: StepAhead, plan: StepPlan, drawing: list[Sequence]
    ) -> list[DrawnTokens]:
        """Return what ``drawing``, those that still decode, drew in the step ``ahead``."""
        self._launch_ahead(plan, drawing)
        drawn, _ = self._draw(list(ahead.sequences), None, ahead.passed)
        by_lease = dict(zip(ahead.leases, drawn, strict=True))
        return [by_lease[sequence.row_lease] for sequence in drawing]

    def _launch_ahead(self, plan: StepPlan, drawing: list[Sequence]) -> None:
        """Launch the step after ``plan`` before the tokens of ``plan`` are read, if only the end of
        a text can change it: the device does not wait for the host then. A text that ends has
        computed one token too many, which is dropped. Its page may be free by then, but the next
        write to it runs later on the same stream."""
        self._ahead = None
        plain = self._sampler.is_plain(drawing) and not any(s.grammar for s in drawing)
        if self._graphs is None or not plain:
            return
        if self.speculator is not None and not self.speculator.idle:
            return
        s = self._scheduler
        if (
            (s.queue and not s.blocked)
            or s.joining
            or s.prefilling
            or len(plan.decode) < len(s.decoding)
        ):
            return
        if not allocate_page_ahead(s.manager, plan.decode):
            return
        size = self._graphs.size_for(plan.decode, None, ahead=1)
        if size is not None:
            self.steps_ahead += 1
            passed = self._run_graph(size, plan.decode, None)
            self._ahead = StepAhead(plan.decode, [s.row_lease for s in plan.decode], passed)

    def _run_model(self, plan: StepPlan, layout: DraftLayout | None) -> ModelPass:
        batch, rows = self._batcher.build(plan, layout)
        taps: dict[int, Tensor | None] = dict.fromkeys(
            self.speculator.taps if self.speculator else ()
        )
        hidden = self._model.hidden(batch, self._pool, taps)
        last_hidden = batch.select_logit_rows(hidden)  # [R, hidden]
        logits = self._model.logits(last_hidden)  # [R, vocab]
        seen = [batch.select_logit_rows(x) for x in taps.values() if x is not None]
        inputs = None
        if batch.paged is not None and batch.paged.decode is not None and layout is not None:
            inputs = DecodeInputs(batch.paged.decode, batch.positions, layout.tokens)
        return ModelPass(rows, hidden, last_hidden, logits, seen, inputs, None)

    def _draw(
        self, drawing: list[Sequence], layout: DraftLayout | None, passed: ModelPass
    ) -> tuple[list[DrawnTokens], DrawnOnDevice]:
        """Draw the tokens of a step and append them to the state of their sequences."""
        masks = self._start_masks(drawing, layout)  # filled while the model computes
        if self._device is not None and self._sampler.is_plain(drawing):
            rows, advanced = passed.rows, passed.tokens is not None
            if layout is None and masks is None:
                return self._device.draw_one_each(passed.logits, rows, passed.tokens)
            if layout is None and masks is not None:
                own = passed.logits[: len(drawing)]
                return self._device.draw_masked(own, rows, masks, advanced=advanced)
            if layout is not None and masks is None and len(drawing) == len(layout.lengths):
                assert passed.inputs is not None
                paged, positions, drafts = passed.inputs
                own = passed.logits[: len(paged.owner)]
                places = self.speculator is not None and self.speculator.needs_hidden_states
                count = len(drawing)
                return self._device.verify(own, paged, positions, drafts, count, places=places)
        logits, vocab = passed.logits, passed.logits.shape[1]
        barred = None if masks is None else masks.wait(vocab, logits.device)
        if layout is None:
            own, advanced = logits[: len(drawing)], passed.tokens is not None
            return self._verifier.draw_one_each(
                drawing, own, passed.rows, barred, advanced=advanced
            )
        if passed.inputs is not None and len(passed.inputs.rows.owner) > len(layout.shape.owner):
            at = layout.shape.rows_when_padded(passed.inputs.rows.most_rows)
            passed.select_rows_(at)
        return self._verifier.verify(drawing, passed.logits, passed.rows, barred, layout)

    def _start_masks(
        self, drawing: list[Sequence], layout: DraftLayout | None
    ) -> PendingMasks | None:
        grammars = [s.grammar for s in drawing]
        if not any(grammars):
            return None
        if layout is None:
            return self._masker.start(grammars)
        shape, tokens = layout.shape, layout.tokens.tolist()
        more = range(len(shape.owner), len(shape.owner) + len(drawing) - len(layout.lengths))
        starts = [*shape.starts.tolist(), *more]
        before = [start - index for index, start in enumerate(starts)]  # preceding draft nodes
        drafts = [tokens[a:b] for a, b in pairwise([*before, len(tokens)])]
        return self._masker.start(grammars, drafts, starts)

    def _add_prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> None:
        """Compute the log-probabilities of prompt tokens that requests ask for; ``hidden`` [T,
        hidden] has the rows of all chunks at its end."""
        start = len(hidden) - plan.work.prompt_tokens
        for sequence, count in plan.chunks:
            if sequence.needs_prompt_logprobs:
                add_prompt_logprobs(sequence, hidden[start : start + count], self._model.logits)
            start += count

    def _advance(self, sequence: Sequence, drawn: DrawnTokens) -> list[TokenOut]:
        """Append the drawn tokens until the sequence ends or its grammar refuses one, and tell the
        scheduler what becomes of the sequence."""
        scored = sequence.prompt_logprobs if sequence.needs_prompt_logprobs else []
        decoding = sequence.phase is Phase.DECODE
        out: list[TokenOut] = []
        for token, logprobs in zip(drawn.tokens, drawn.logprobs, strict=True):
            problem = None if sequence.grammar is None else self._advance_grammar(sequence, token)
            if problem is not None:
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

    def _advance_grammar(self, sequence: Sequence, token: int) -> InvalidRequest | None:
        """Let the sequence's grammar accept ``token``. Return why it cannot follow the text."""
        grammar, allowed = sequence.grammar, sequence.allowed_tokens
        assert grammar is not None
        if allowed and token not in allowed and token not in self._eos:
            message = "allowed_token_ids leave no token that the grammar allows next"
            return InvalidRequest(message, "allowed_token_ids")
        if not grammar.advance(token):
            return invalid_grammar(grammar.problem or "no token fits")
        return None

    def take_refused(self) -> list[tuple[int, InvalidRequest]]:
        """Return and clear the handles of sequences whose grammar failed, each with the error."""
        taken, self._refused = self._refused, []
        return taken
