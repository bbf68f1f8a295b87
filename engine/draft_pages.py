"""Pages for what is proposed: taken before a step, given back in it. Torch-free.

Drafts never cost anybody a page that it runs on: they take what is free or evictable, and where
that is not enough there are fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.block_manager import BlockManager
from engine.sequence import Sequence, blocks_for
from protocol.blocks import BLOCK_TOKENS


def extend(manager: BlockManager, sequences: Seq[Sequence], wanted: Seq[int]) -> tuple[int, ...]:
    """Take the pages that ``wanted`` [B] draft nodes need; returns the nodes that fit: on the
    pages, and into what may still be said (a step draws one token more than it accepts)."""
    return tuple(
        _extend(manager, sequence, nodes) for sequence, nodes in zip(sequences, wanted, strict=True)
    )


def _extend(manager: BlockManager, sequence: Sequence, nodes: int) -> int:
    tokens = len(sequence.tokens)
    nodes = max(0, min(nodes, sequence.request.length_limit - tokens - 1))
    missing = blocks_for(tokens + nodes) - len(sequence.pages)
    if missing > 0:
        sequence.pages += manager.allocate(min(missing, manager.available))
    return min(nodes, len(sequence.pages) * BLOCK_TOKENS - tokens)


def trim(manager: BlockManager, sequence: Sequence) -> None:
    """Give back the pages beyond the tokens that the sequence has."""
    needed = blocks_for(len(sequence.tokens))
    if needed < len(sequence.pages):
        manager.release(sequence.pages[needed:])
        del sequence.pages[needed:]
        sequence.seated_pages = min(sequence.seated_pages, needed)
