"""The packed batch of one step: every row is a token, without padding between sequences.

    tokens     [t0 t1 t2 | a a a a a a | b b b]
                decode     chunk        chunk

Decode rows come first: one token per sequence, or with drafts the last token of each sequence
followed by its drafts. Then come the prefill chunks, back to back. Which tokens a row attends to
depends on the layer's window, so a batch has AttentionMetadata for each window of the model. The
batcher and the draft proposers build batches, and ``DecoderModel.hidden`` consumes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DecodeGroup:
    """``r`` decoding sequences of similar length that one attention call computes, with ``queries``
    rows each. A sequence with fewer rows repeats its last one. Its keys begin with its first page
    in reach."""

    rows: Tensor | slice  # [r * queries] decode rows of the batch, or a slice of all of them
    pages: Tensor  # [r, width] page ids, padded with page 0
    base: Tensor  # [r] int64, position of the first token on the first page
    # 0 where attended, else -inf; ``shared`` is the number of query heads per KV head
    mask: Tensor  # [r, 1, 1 or queries * shared, width * page_tokens]
    queries: int = 1


@dataclass(frozen=True)
class PromptChunk:
    """One prefill chunk: ``count`` tokens of a sequence after its computed context."""

    start: int  # first row in the batch
    count: int
    pages: Tensor | None  # [n] pages of the context in reach and of the chunk; None: no context
    span: int  # keys: tokens on these pages, up to the last one of the chunk
    mask: Tensor | None  # [count, span], 0 or -inf; None: causal, without context


@dataclass(frozen=True)
class AttentionMetadata:
    """The pages and masks of all rows of a batch, for the layers of one window."""

    decode_rows: int
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]


@dataclass(frozen=True)
class PackedBatch:
    """The inputs of one forward pass over ``T`` tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, pool slot for each token's KV
    attention: Mapping[int, AttentionMetadata]  # by window; 0: no window
    logit_rows: Tensor | None  # [R] rows that need logits; None: all

    def select_logit_rows(self, hidden: Tensor) -> Tensor:
        """Return the rows [R, ...] of ``hidden`` [T, ...] that need logits."""
        return hidden if self.logit_rows is None else hidden[self.logit_rows]
