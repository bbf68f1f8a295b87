"""Steps with few prompt tokens recorded as CUDA graphs, with or without sequences that decode.

    recorded   inputs in the graph's memory -> the model -> hidden states of all rows
    then       logits of the rows that draw

The host launches the kernels of such a step one after the other more slowly than a GPU computes
them. A graph has a fixed number of rows; those beyond the step's stand for no token and have no
slot. Its attention takes the rows as runs (engine/batching/prompt_runs.py). Steps with drafts or
with more rows are not recorded; a step that has a graph gets no drafts, which would cost more than
they bring. The engine's stepper owns this object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.batching.attention_metadata import PackedBatch
from engine.batching.batcher import RowState
from engine.batching.draft_layout import IntArray
from engine.batching.prompt_runs import RunRows, count_pieces
from engine.execution.model_pass import ModelPass
from engine.kernels.attention import rows_of_runs
from engine.kernels.paged_rows import PagedAttention, PagedRows, PieceList, piece_count
from engine.kernels.recording import (
    RUN_ROWS,
    PromptGraphSize,
    Recorder,
    Recording,
    prompt_graph_sizes,
    recording_session,
)
from engine.kv_cache.kv_pool import KVPool
from engine.model.decoder import DecoderModel
from engine.scheduling.step_policy import StepPlan
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS

_PER_ROW = ("tokens", "positions", "slots", "depth", "ancestors", "owner")
_PER_RUN = ("state_row", "known", "first_row", "row_count", "starts")
_DRAWN = ("logit_rows", "drawing")


class _GraphMemory:
    """What the host writes before each replay, in memory that all graphs share."""

    def __init__(self, rows: int, pieces: int, device: torch.device) -> None:
        names = (*_PER_ROW, *_PER_RUN, *_DRAWN)
        self._device = device
        self._names = (*names, "items", "total")
        self._lengths = [*[rows] * len(names), pieces, 1]
        self._written = upload(self._empty()[0], device).clone()
        parts = self._written.split(self._lengths)
        self.tensors = dict(zip(self._names, parts, strict=True))

    def write(self, rows: RunRows) -> None:
        """Let the next replay compute ``rows``."""
        numbers, parts = self._empty()
        items, starts = rows.piece_items()
        written = {name: getattr(rows, name) for name in (*_PER_ROW, *_PER_RUN[:-1], *_DRAWN)}
        written |= {"starts": starts, "items": items, "total": np.array([len(items)])}
        for name, values in written.items():
            parts[name][: len(values)] = values
        self._written.copy_(upload(numbers, self._device))

    def _empty(self) -> tuple[IntArray, dict[str, IntArray]]:
        """Return the numbers of no rows, and their parts by name."""
        numbers = np.zeros(sum(self._lengths), dtype=np.int64)
        split = np.split(numbers, np.cumsum(self._lengths)[:-1])
        parts = dict(zip(self._names, split, strict=True))
        parts["slots"][:] = -1
        return numbers, parts


@dataclass(frozen=True)
class _Graph:
    hidden: Tensor  # [1 + taps, rows, hidden], in memory that all graphs share
    recording: Recording


class PromptGraphs:
    """The graphs of one engine, whose steps have up to ``most_rows`` rows."""

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        state: RowState,
        recorder: Recorder,
        taps: Sequence[int],
        most_rows: int,
    ) -> None:
        self._model, self._pool, self._state = model, pool, state
        self._recorder, self._taps = recorder, tuple(taps)
        c, longest = model.config, piece_count(state.block_table.shape[1] * BLOCK_TOKENS)
        sequences = len(state.length) - 1
        group, element = c.heads // c.kv_heads, model.dtype.itemsize
        self._run_rows = rows_of_runs(RUN_ROWS, group, c.head_dim, element)
        row_bytes = 4 * c.heads * c.head_dim
        self._sizes = prompt_graph_sizes(most_rows, sequences, longest, row_bytes, self._run_rows)
        rows, pieces = max(n for n, _ in self._sizes), max(n for _, n in self._sizes)
        self._memory = _GraphMemory(rows, pieces, state.device)
        self._hidden = model.weights.embedding.new_empty((1 + len(taps), rows, c.hidden_size))
        self._graphs: dict[PromptGraphSize, _Graph] = {}

    def record(self, progress: Callable[[float], None]) -> None:
        """Record all graphs. No sequence may be running."""
        with recording_session(self._state.device):
            for done, size in enumerate(reversed(self._sizes)):  # the largest one first
                progress(done / len(self._sizes))
                batch, hidden = self._batch(size), self._hidden[:, : size.rows]
                recording = self._recorder(partial(self._compute, batch, hidden))
                self._graphs[size] = _Graph(hidden, recording)

    def _batch(self, size: PromptGraphSize) -> PackedBatch:
        row = {name: self._memory.tensors[name][: size.rows] for name in _PER_ROW}
        run = {name: self._memory.tensors[name][: size.rows] for name in _PER_RUN}
        items, total = self._memory.tensors["items"][: size.pieces], self._memory.tensors["total"]
        rows = PagedRows(
            table=self._state.block_table,
            state_row=run["state_row"],
            known=run["known"],
            first_row=run["first_row"],
            first_node=run["first_row"],  # attention does not read it
            row_count=run["row_count"],
            depth=row["depth"],
            ancestors=row["ancestors"],
            owner=row["owner"],
            pieces=PieceList(items, run["starts"], total),
            most_rows=self._run_rows,
        )
        paged = PagedAttention(size.rows, rows, ())
        return PackedBatch(row["tokens"], row["positions"], row["slots"], {}, None, paged)

    @torch.inference_mode()
    def _compute(self, batch: PackedBatch, out: Tensor) -> None:
        taps: dict[int, Tensor | None] = dict.fromkeys(self._taps)
        out[0].copy_(self._model.hidden(batch, self._pool, taps))
        for kept, tap in zip(out[1:], taps.values(), strict=True):
            assert tap is not None
            kept.copy_(tap)

    def size_for(self, plan: StepPlan) -> PromptGraphSize | None:
        """Return the size of the graph that computes a step; None: there is none."""
        count = len(plan.decode) + plan.work.prompt_tokens
        if count > self._sizes[-1].rows:
            return None
        pieces = count_pieces(plan, self._run_rows)
        return next((n for n in self._sizes if n.rows >= count and n.pieces >= pieces), None)

    def run(self, plan: StepPlan, size: PromptGraphSize) -> ModelPass:
        """Compute a step without drafts in the graph of ``size``, which ``size_for`` returned. What
        is returned is overwritten by the next step."""
        rows = RunRows.of(plan, self._run_rows)
        self._state.seat([*plan.decode, *(sequence for sequence, _ in plan.chunks)])
        self._memory.write(rows)
        graph = self._graphs[size]
        graph.recording.replay()
        at, drawing = (self._memory.tensors[name][: len(rows.drawing)] for name in _DRAWN)
        hidden, *taps = (kept[: len(rows.tokens)] for kept in graph.hidden)
        last_hidden = hidden[at]
        logits = self._model.logits(last_hidden)
        seen = [tap[at] for tap in taps]
        return ModelPass(drawing, hidden, last_hidden, logits, seen, None, None)
