"""The packed batch of one step: every row is a token, and there is no padding between sequences.

    tokens     [t0 t1 t2 | a a a a a a | b b b]
                decode     chunk        chunk

Decode rows come first, one token each, or with drafts the last token of each sequence and then its
drafts; then prefill chunks, back to back. What a row attends to depends on the layer's window: a
batch has one view for each window that the model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of similar length that decode, attended to together, ``queries`` rows of each. A
    sequence's span begins with its first page that is attended to; ``base`` is the position of that
    page's first token. Where a sequence has fewer rows, its last one stands again."""

    rows: Tensor | slice  # which decode rows of the batch: [r * queries] or all of them
    pages: Tensor  # [r, width] page ids, padded with page 0
    base: Tensor  # [r] int64
    mask: Tensor  # [r, 1, 1 or queries * shared, width * page_tokens]: 0 where attended, else -inf
    queries: int = 1


@dataclass(frozen=True)
class Chunk:
    """One prefill chunk: ``count`` tokens of a sequence after ``context`` computed ones."""

    start: int  # first row in the batch
    count: int
    pages: Tensor | None  # [n] pages of the context in reach and of the chunk; None: no context
    span: int  # tokens on those pages, up to the chunk's last
    mask: Tensor | None  # [count, span], 0 or -inf; None: causal, without context


@dataclass(frozen=True)
class View:
    """What the rows of a batch attend to in layers of one window."""

    decode_rows: int
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass over ``T`` tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: where each token's KV goes
    views: Mapping[int, View]  # by window; 0: everything
    logit_rows: Tensor | None  # [R] rows whose logits are wanted; None: all

    def drawing(self, hidden: Tensor) -> Tensor:
        """Of ``hidden`` [T, ...], the rows whose logits are wanted: [R, ...]."""
        return hidden if self.logit_rows is None else hidden[self.logit_rows]
