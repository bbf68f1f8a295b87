"""A draft model with the target's vocabulary (Leviathan et al. 2023; Chen et al. 2023).

    catch up   in chunks, over prompts or texts whose KV the draft model lacks
    pass 1     over what was added since the last proposal, one or two tokens of each sequence
    pass 2 ..  over the token just drawn, of sequences that need more nodes

Its KV is in a pool of its own under the target's page numbers: a token has the same slot in both.
DraftKvIndex knows which tokens have KV there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.batching.batcher import RowState
from engine.model.decoder import DecoderModel, warm_up_products
from engine.model.linear import make_draft_linear
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.device_span import DeviceSpan
from engine.speculation.draft_source import MAX_CATCH_UP, catch_up_chunk, check_vocabularies
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.draft_kv_index import DraftKvIndex
from engine.speculation.proposers.draft_runner import DraftModelRunner, DraftRequest
from engine.speculation.proposers.proposer import Proposer
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError

if TYPE_CHECKING:
    from engine.speculation.proposers.paged_draft_runner import PagedDraftRunner

MAX_INLINE_TOKENS = 4
"""Missing tokens that pass 1 computes as rows of their own; more are caught up in a chunk first."""

CATCH_UP_WORTH = 16
"""Missing tokens worth catching up for each token that may still be generated: a draft computes a
prompt token in about a hundredth of the target's step time."""

WARM_UP_S = 0.5
"""Maximum seconds for preparing matrix products on a CPU; the others are prepared when needed."""


class DraftModel(Proposer):
    """Proposes chains with a draft model; ``load_draft`` creates it. ``state`` is the target's and
    ``pages`` the size of its pool. ``positions`` is the draft's maximum context, ``chunk`` the
    maximum number of tokens it catches up in a step."""

    name = "draft"

    def __init__(
        self,
        model: DecoderModel,
        state: RowState,
        *,
        pages: int,
        positions: int,
        most: int,
        chunk: int = MAX_CATCH_UP,
    ) -> None:
        self.most = most
        self._state = state
        self._positions, self._chunk = positions, chunk
        self._runner = _make_runner(model, state, pages, most)
        self._catching_up = DeviceSpan(time.perf_counter)
        self._index = DraftKvIndex(pages)
        # The last requests, and what returns their drafts.
        self._last: tuple[list[DraftRequest], Callable[[], list[list[int]]]] | None = None

    def passes(self, nodes: int) -> int:
        return nodes

    @property
    def caught_up_s(self) -> float:
        return self._catching_up.seconds

    def record_graphs(self, progress: Callable[[float], None]) -> None:
        self._runner.record(progress)

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """Return chains for ``sequences`` [B]; see Proposer. rows: [B] int64."""
        self._record_last_drafts()
        self._catching_up.begin(rows.device)
        ready, caught_up = self._catch_up(sequences, wanted)
        self._catching_up.end() if caught_up else self._catching_up.clear()
        if not ready:
            return Drafts([0] * len(sequences), torch.empty_like(rows[:0]))
        ready.sort(key=lambda r: -r.nodes)  # sequences that need more passes come first
        for r in ready:
            self._index.record_write(r.sequence, len(r.sequence.tokens), r.nodes - 1)
        places = upload([r.place for r in ready], rows.device)
        drawn = self._runner.draw(ready, rows[places])
        self._last = ready, self._runner.read_later(drawn)
        return _packed(ready, drawn, len(sequences))

    def forget(self, leases: Sequence[int]) -> None:
        self._record_last_drafts()
        self._index.forget(leases)

    def _record_last_drafts(self) -> None:
        """Read the last draft tokens, late enough that the device has completed them."""
        if self._last is not None:
            ready, read = self._last
            self._last = None
            for r, tokens in zip(ready, read(), strict=True):
                self._index.record_drafts(r.sequence.row_lease, tokens[: r.nodes - 1])

    def _catch_up(
        self, sequences: Sequence[Running], wanted: Sequence[int]
    ) -> tuple[list[DraftRequest], bool]:
        """Compute missing KV, up to ``self._chunk`` tokens. Return the requests that can get drafts
        in this step, and whether any KV was missing."""
        ready: list[DraftRequest] = []
        chunks: list[tuple[Running, int, int]] = []  # known tokens, tokens to compute
        left = self._chunk
        for place, (sequence, nodes) in enumerate(zip(sequences, wanted, strict=True)):
            length = len(sequence.tokens)
            nodes = min(nodes, self.most, self._positions - length + 1)
            if nodes <= 0:
                continue
            if sequence.row_pages != len(sequence.pages):
                self._state.seat((sequence,))
            known = min(self._index.tokens(sequence), length - 1)
            if length - known > MAX_INLINE_TOKENS:
                missing = length - 1 - known
                count = min(missing, left) if _worth_catching_up(sequence, missing) else 0
                if count:
                    chunks.append((sequence, known, count))
                    left -= count
                    self._index.record_write(sequence, known + count)
                if count < missing:
                    continue
                known += count
            ready.append(DraftRequest(place, sequence, known, nodes))
        if chunks:
            self._runner.compute(chunks)
        return ready, bool(chunks)


def _make_runner(
    model: DecoderModel, state: RowState, pages: int, most: int
) -> DraftModelRunner | PagedDraftRunner:
    """Return the runner for the layers of ``model``."""
    if not model.uses_kernels:
        return DraftModelRunner(model, state, pages)
    # Only an installation for GPUs has Triton, which this module imports.
    from engine.speculation.proposers.paged_draft_runner import PagedDraftRunner

    return PagedDraftRunner(model, state, pages, most)


def load_draft(
    folder: Path,
    target: DecoderModel,
    state: RowState,
    *,
    pages: int,
    most: int,
    target_folder: Path | None = None,
) -> DraftModel:
    """Load the model in ``folder`` as the draft of ``target``, with its dtype and device. Raises
    StartupError if it cannot be loaded, has another vocabulary, or has non-finite weights.
    Vocabulary sizes may differ if the tokenizers are equal, because checkpoints pad
    vocabularies."""
    config = load_config(folder)
    if target_folder is not None:
        check_vocabularies(folder, target_folder)
    elif config.vocab_size != target.config.vocab_size:
        raise StartupError(
            f"{folder}: has a vocabulary of {config.vocab_size} tokens; expected the target's,"
            f" of {target.config.vocab_size}"
        )
    weights = load_weights(
        folder, config, target.dtype, target.device, linear=make_draft_linear, finite=True
    )
    longest = state.block_table.shape[1] * BLOCK_TOKENS
    positions = min(config.max_positions, longest)
    model = DecoderModel(config, weights, positions)
    chunk = catch_up_chunk(target.weights.bytes, model.weights.bytes)
    if model.device.type == "cpu":
        warm_up_products(model, max(chunk, MAX_INLINE_TOKENS * len(state.length)), most_s=WARM_UP_S)
    return DraftModel(model, state, pages=pages, positions=positions, most=most, chunk=chunk)


def _worth_catching_up(sequence: Running, missing: int) -> bool:
    return missing <= CATCH_UP_WORTH * (sequence.request.length_limit - len(sequence.tokens))


def _packed(ready: Sequence[DraftRequest], drawn: Tensor, sequences: int) -> Drafts:
    """Pack drafts [b, nodes], which are in the order of ``ready``, in batch order."""
    nodes = drawn.shape[1]
    counts = np.zeros(sequences, dtype=np.int64)
    start = np.zeros(sequences, dtype=np.int64)  # in ``drawn``, flat
    for i, r in enumerate(ready):
        counts[r.place], start[r.place] = r.nodes, i * nodes
    ends = np.cumsum(counts)
    shift = np.repeat(start - (ends - counts), counts)
    at = upload(shift + np.arange(int(ends[-1])), drawn.device)
    return Drafts(counts.tolist(), drawn.flatten()[at])
