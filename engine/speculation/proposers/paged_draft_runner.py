"""Runs a draft model whose layers are kernels; the reference is ``DraftModelRunner``.

DraftModel creates it where kernels run. Nothing in a proposal waits for the device: the host knows
how many tokens each sequence has and how many drafts it gets, and the tokens stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.batching.attention_metadata import PackedBatch
from engine.batching.batcher import RowState
from engine.batching.paged_batcher import pack_prompts
from engine.kernels.paged_rows import PagedAttention
from engine.kv_cache.kv_pool import make_pool
from engine.model.decoder import DecoderModel
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.proposers.draft_passes import DraftPasses
from engine.speculation.proposers.draft_runner import DraftRequest, chunk_views
from engine.speculation.proposers.draft_sampler import DraftSampler


class PagedDraftRunner:
    """Runs a draft model over the rows of ``state``. It owns the model's KV pool, of ``pages``
    pages. A sequence gets at most ``most`` drafts."""

    def __init__(self, model: DecoderModel, state: RowState, pages: int, most: int) -> None:
        self._model, self._state = model, state
        format_ = model.config.kv_format("exact", "wide", model.dtype.itemsize)
        self._pool = make_pool(format_, pages, model.dtype, model.device)
        self._passes = DraftPasses(model, self._pool, state)
        # Prompts attend by torch's general attention, which needs masks, or without them.
        self._windows = [] if model.prompts_by_varlen else sorted(set(model.config.windows))
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)
        pinned = model.device.type == "cuda"
        drafts = len(state.length) * most
        self._host = torch.zeros(drafts, dtype=torch.int64, pin_memory=pinned)
        self._host_numbers = self._host.numpy()

    def record(self, progress: Callable[[float], None]) -> None:
        """Record the passes as CUDA graphs."""
        self._passes.record(progress)

    def compute(self, chunks: Sequence[tuple[Running, int, int]]) -> None:
        """Compute KV for each (sequence, known, count): ``count`` tokens after ``known`` ones."""
        spans = [(s, known, known + count) for s, known, count in chunks]
        prompts, inputs, _ = pack_prompts(spans, self._state.device)
        views = chunk_views(chunks, self._state.block_table, self._windows, self._like)
        tokens = inputs.tokens.clamp(max=self._model.config.vocab_size - 1)
        paged = PagedAttention(0, None, prompts)
        batch = PackedBatch(tokens, inputs.positions, inputs.slots, views, None, paged)
        self._model.hidden(batch, self._pool)

    def draw(self, ready: Sequence[DraftRequest], rows: Tensor) -> Tensor:
        """Draw chains for ``ready``, which is sorted by falling number of nodes. rows: [b] int64,
        rows in the state. Returns [b, nodes of the first] int64, undefined beyond the nodes of a
        sequence."""
        nodes, passes = ready[0].nodes, self._passes
        params = [r.sequence.request.sampling for r in ready]
        sampler: DraftSampler | None = None
        if any(p.has_filters and not p.is_greedy for p in params):
            sampler = DraftSampler([r.sequence for r in ready], rows, self._state.sampling)
        drawn = torch.empty(len(ready), nodes, dtype=torch.int64, device=rows.device)
        passes.begin(ready)
        for place in range(nodes):
            going = [r for r in ready if r.nodes > place]
            own = rows[: len(going)]
            tokens = passes.run(going, place)
            if sampler is not None:
                positions = passes.length[own] - 1  # the pass has added its token already
                tokens = sampler.draw(passes.logits[: len(going)], positions)
                passes.redraw(own, tokens)
            drawn[: len(going), place] = tokens
        return drawn

    def read_later(self, drawn: Tensor) -> Callable[[], list[list[int]]]:
        """Begin to copy drafts [b, nodes] to the host. The function returned waits for them and
        returns them; it must be called before ``draw`` is called again."""
        count = drawn.numel()
        self._host[:count].copy_(drawn.flatten(), non_blocking=True)
        event = torch.cuda.Event() if drawn.device.type == "cuda" else None
        if event is not None:
            event.record()

        def read() -> list[list[int]]:
            if event is not None:
                event.synchronize()
            tokens: list[list[int]] = self._host_numbers[:count].reshape(drawn.shape).tolist()
            return tokens

        return read
