"""Pages for what is proposed: taken before a step, given back in it. Torch-free.

Drafts never cost anybody a page that it runs on: they take what is free or evictable, and where
that is not enough there are fewer of them. There are never more in a step than its memory was
counted for (engine/sizing.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.block_manager import BlockManager
from engine.sequence import Sequence, blocks_for
from protocol.blocks import BLOCK_TOKENS

MOST_NODES = 256
"""Of all sequences of a step together: each is one more row of logits."""


def extend(manager: BlockManager, sequences: Seq[Sequence], wanted: Seq[int]) -> tuple[int, ...]:
    """Take the pages that ``wanted`` [B] draft nodes need; returns the nodes that fit: into what
    may still be said (a step draws one token more than it accepts), into a step, on the pages."""
    rooms = [s.request.length_limit - len(s.tokens) - 1 for s in sequences]
    fitting = [max(0, min(nodes, room)) for nodes, room in zip(wanted, rooms, strict=True)]
    counts = shares(fitting, MOST_NODES)
    return tuple(_extend(manager, s, nodes) for s, nodes in zip(sequences, counts, strict=True))


def shares(wanted: Seq[int], most: int) -> list[int]:
    """``wanted`` [B], cut to ``most`` in all: who wants more than an equal share of what the others
    leave gets that share; what the division leaves goes to the first of these in the list."""
    counts, left = list(wanted), most
    if sum(counts) <= most:
        return counts
    greedy = sorted(range(len(counts)), key=counts.__getitem__)
    while counts[greedy[0]] * len(greedy) <= left:
        left -= counts[greedy.pop(0)]
    share, over = divmod(left, len(greedy))
    for place, i in enumerate(sorted(greedy)):
        counts[i] = share + (place < over)
    return counts


def _extend(manager: BlockManager, sequence: Sequence, nodes: int) -> int:
    tokens = len(sequence.tokens)
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
