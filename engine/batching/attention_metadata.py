"""The packed batch of one step, and which pages and tokens each of its rows attends to.

    tokens     [t0 t1 t2 | a a a a a a | b b b]
                decode     chunk        chunk

Every row of a batch is a token; there is no padding between sequences. Decode rows come first: one
token per sequence, or with drafts the last token of each sequence followed by its drafts. Then come
the prefill chunks, back to back. Which tokens a row attends to depends on the layer's window, so a
batch has ``AttentionMetadata`` for each window of the model. The batcher and the draft proposers
build batches, and ``DecoderModel.hidden`` consumes them.

A window of ``w`` lets a token at position p attend to p - w + 1 .. p; 0 means no window. Pages that
lie before the window completely are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batching.draft_layout import BoolArray, DraftLayout, IntArray
from engine.kernels.paged_rows import PagedAttention
from protocol.block_keys import BLOCK_TOKENS


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
    # For kernels; where it is present, ``attention`` has only what no kernel computes.
    paged: PagedAttention | None = None

    def select_logit_rows(self, hidden: Tensor) -> Tensor:
        """Return the rows [R, ...] of ``hidden`` [T, ...] that need logits."""
        return hidden if self.logit_rows is None else hidden[self.logit_rows]


def decode_groups(
    block_table: Tensor, lengths: Tensor, window: int, dtype: torch.dtype
) -> tuple[DecodeGroup, ...]:
    """Group decode rows by the number of pages they read, to limit the padding in attention.

    ``block_table`` [R, max_pages] holds page ids, ``lengths`` [R] the tokens known, including the
    one to decode. A group holds rows whose page counts share a power of two: padding stays below
    half, and the Python work grows with the number of groups instead of the batch.
    """
    first = (lengths - window).clamp(min=0) // BLOCK_TOKENS if window else lengths * 0  # [R]
    pages = (lengths + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS - first  # [R]
    longest, shortest = int(pages.max()), int(pages.min())
    if longest <= 2 * shortest:
        return (_group(block_table, lengths, first, slice(None), longest, window, dtype),)
    # bit_length(p - 1): 1 -> 0, 2 -> 1, 3..4 -> 2, 5..8 -> 3
    kind = torch.ceil(torch.log2(pages.double())).long()  # [R]
    groups = []
    for value in torch.unique(kind).tolist():
        rows = (kind == value).nonzero().squeeze(1)  # [r]
        width = int(pages[rows].max())
        group = _group(block_table[rows], lengths[rows], first[rows], rows, width, window, dtype)
        groups.append(group)
    return tuple(groups)


def _group(
    table: Tensor,
    lengths: Tensor,
    first: Tensor,
    rows: Tensor | slice,
    width: int,
    window: int,
    dtype: torch.dtype,
) -> DecodeGroup:
    """``table`` [r, max_pages], ``lengths`` [r] and ``first`` [r] belong to the ``rows``."""
    columns = first[:, None] + torch.arange(width, device=table.device)  # [r, width]
    pages = table.gather(1, columns.clamp_(max=table.shape[1] - 1))  # [r, width]
    base = first * BLOCK_TOKENS  # [r]
    at = base[:, None] + torch.arange(width * BLOCK_TOKENS, device=table.device)  # [r, span]
    hidden = at >= lengths[:, None]  # [r, span]
    if window:
        hidden |= at < lengths[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=table.device)
    mask.masked_fill_(hidden, float("-inf"))
    return DecodeGroup(rows, pages, base, mask[:, None, None, :])


def advance_group_(group: DecodeGroup, lengths: Tensor, window: int) -> None:
    """Update the mask in place for one more token per row on the same pages; with a window, the
    oldest token becomes hidden. ``lengths`` [R] are those of all decode rows."""
    mask = group.mask[:, 0, 0]  # [r, span]
    newest = (lengths[group.rows] - 1 - group.base)[:, None]  # [r, 1]
    mask.scatter_(1, newest, 0.0)
    if window:
        left = newest - window
        at = left.clamp(min=0)
        before = mask.gather(1, at)
        mask.scatter_(1, at, before.masked_fill_(left >= 0, float("-inf")))


def chunk_attention(
    table: Tensor, start: int, context: int, count: int, window: int, like: Tensor
) -> PromptChunk:
    """Return the chunk of ``count`` tokens after ``context`` computed ones, with its first row at
    ``start``. ``table`` [max_pages] holds the page ids of the sequence; the mask gets the type and
    device of ``like``."""
    if context == 0 and (not window or count <= window):
        return PromptChunk(start, count, None, count, None)
    first = max(0, context + 1 - window) // BLOCK_TOKENS if window else 0
    span = context + count - first * BLOCK_TOKENS
    mask = like.new_full((count, span), float("-inf"))
    mask.triu_(context - first * BLOCK_TOKENS + 1)
    if window:
        # Query i at key q = context - base + i attends to keys above q - window.
        beyond = like.new_full((count, span), float("-inf"))
        mask += beyond.tril_(context - first * BLOCK_TOKENS - window)
    last = -(-(context + count) // BLOCK_TOKENS)
    return PromptChunk(start, count, table[first:last] if context else None, span, mask)


def verify_groups(
    block_table: Tensor, layout: DraftLayout, window: int, dtype: torch.dtype, shared: int
) -> tuple[DecodeGroup, ...]:
    """Group sequences with drafts by the pages they read, like ``decode_groups``, and separate
    those without drafts, to limit the padding in attention.

    ``block_table`` [B, max_pages] holds page ids; ``shared`` is the number of query heads per KV
    head.
    """
    rows, lengths = layout.shape.row_counts, layout.lengths  # [B], [B]
    first = np.maximum(lengths - window, 0) // BLOCK_TOKENS if window else lengths * 0  # [B]
    pages = -(-(lengths - 1 + rows) // BLOCK_TOKENS) - first  # [B]
    parts = [
        _VerifyPart(block_table, layout, first[s], s, int(pages[s].max()))
        for s in group_by_pages(pages, rows > 1)
    ]
    return tuple(_verify_group(part, window, dtype, shared) for part in parts)


def group_by_pages(pages: IntArray, apart: BoolArray | None = None) -> list[IntArray]:
    """Return the indices [b] of each group of sequences, as in ``decode_groups`` but on the host.
    ``pages`` [B] counts pages; sequences that differ in ``apart`` [B] are in different groups."""
    apart = np.zeros(len(pages), dtype=np.bool_) if apart is None else apart
    if pages.max() <= 2 * pages.min() and (apart == apart[0]).all():
        return [np.arange(len(pages))]
    kind = np.ceil(np.log2(pages)).astype(np.int64) * 2 + apart
    return [np.flatnonzero(kind == value) for value in np.unique(kind)]


@dataclass(frozen=True)
class _VerifyPart:
    """Sequences of a layout that one attention call computes."""

    table: Tensor  # [B, max_pages] page ids, of all sequences
    layout: DraftLayout
    first: IntArray  # [b] first page in reach
    sequences: IntArray  # [b]
    width: int  # pages

    @property
    def is_whole_layout(self) -> bool:
        return len(self.sequences) == len(self.layout.lengths)


def _verify_group(part: _VerifyPart, window: int, dtype: torch.dtype, shared: int) -> DecodeGroup:
    shape, device = part.layout.shape, part.table.device
    queries = int(shape.row_counts[part.sequences].max())
    rows = shape.padded_rows(part.sequences, queries)  # [b, queries]
    mask = _verify_mask(part, queries, rows, window)  # [b, queries, span]
    mask = mask.repeat(shared, axis=1)  # [b, queries * shared, span]
    table = part.table
    if not part.is_whole_layout:
        table = table[torch.from_numpy(part.sequences).to(device)]  # [b, max_pages]
    pages = table[:, : part.width]  # [b, width]
    if part.first.any():
        place = torch.from_numpy(part.first[:, None] + np.arange(part.width)).to(device)
        pages = table.gather(1, place.clamp_(max=table.shape[1] - 1))
    unpadded = part.is_whole_layout and shape.uniform
    return DecodeGroup(
        rows=slice(None) if unpadded else torch.from_numpy(rows.ravel()).to(device),
        pages=pages,
        base=torch.from_numpy(part.first * BLOCK_TOKENS).to(device),
        mask=torch.from_numpy(mask).to(device, dtype)[:, None],
        queries=queries,
    )


def _verify_mask(
    part: _VerifyPart, queries: int, rows: IntArray, window: int
) -> NDArray[np.float32]:
    """Return the mask [b, queries, span] of ``rows`` [b, queries]: each row attends to the known
    tokens, and to the draft nodes on the path to its own node."""
    shape, sequences = part.layout.shape, part.sequences
    last = part.layout.lengths[sequences] - 1  # [b] slot of the last token
    columns = last - part.first * BLOCK_TOKENS  # [b] its key
    spans = np.arange(part.width * BLOCK_TOKENS)  # [span]
    if shape.is_chain and not window:
        upto = columns[:, None] + shape.offset[rows]  # [b, queries]
        return _to_mask(spans > upto[:, :, None])
    attended = np.repeat(spans < columns[:, None, None], queries, axis=1)  # [b, queries, span]
    seen = shape.visible_rows(sequences, queries)  # [b, queries, queries]
    # Keys of repeated rows are hidden.
    seen &= (np.arange(queries) < shape.row_counts[sequences][:, None])[:, None, :]
    if window:
        positions = last[:, None] + shape.depth[rows]  # [b, queries]
        slots = (part.first * BLOCK_TOKENS)[:, None, None] + spans  # [b, 1, span]
        attended &= slots > positions[:, :, None] - window
        seen &= positions[:, None, :] > positions[:, :, None] - window
    group, query, row = np.nonzero(seen)
    attended[group, query, columns[group] + row] = True
    return _to_mask(~attended)


def _to_mask(hidden: BoolArray) -> NDArray[np.float32]:
    out = np.zeros(hidden.shape, dtype=np.float32)
    out[hidden] = -np.inf
    return out
