"""Pages for tokens that are not known yet: draft nodes, and the token of a step launched ahead.

The engine allocates pages for draft nodes before a step, and the stepper frees them after it.

Drafts use only pages that are free or evictable, so they never preempt a sequence; where these do
not suffice, there are fewer drafts. One step has at most MAX_DRAFT_NODES of them, because its
memory was estimated for so many (engine/memory/memory_footprint.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.kv_cache.block_manager import BlockManager
from engine.scheduling.sequence import Sequence, blocks_for
from protocol.block_keys import BLOCK_TOKENS

MAX_DRAFT_NODES = 256
"""Limit over all sequences of a step: each node is one more row of logits."""


def allocate_draft_pages(
    manager: BlockManager, sequences: Seq[Sequence], wanted: Seq[int]
) -> tuple[int, ...]:
    """Allocate pages for ``wanted`` [B] draft nodes, which ``trim_draft_pages`` frees after the
    step. Return the nodes of each sequence that fit into its length limit (a step draws one token
    more than it accepts), into the step, and on the pages."""
    limits = [s.request.length_limit - len(s.tokens) - 1 for s in sequences]
    fitting = [max(0, min(nodes, limit)) for nodes, limit in zip(wanted, limits, strict=True)]
    counts = fair_shares(fitting, MAX_DRAFT_NODES)
    return tuple(_allocate(manager, s, nodes) for s, nodes in zip(sequences, counts, strict=True))


def fair_shares(wanted: Seq[int], limit: int) -> list[int]:
    """Cut ``wanted`` [B] to ``limit`` in total (max-min fairness): entries above an equal share of
    what the others leave get that share, and the remainder of the division goes to the first of
    these."""
    counts, left = list(wanted), limit
    if sum(counts) <= limit:
        return counts
    greedy = sorted(range(len(counts)), key=counts.__getitem__)
    while counts[greedy[0]] * len(greedy) <= left:
        left -= counts[greedy.pop(0)]
    share, over = divmod(left, len(greedy))
    for place, i in enumerate(sorted(greedy)):
        counts[i] = share + (place < over)
    return counts


def _allocate(manager: BlockManager, sequence: Sequence, nodes: int) -> int:
    tokens = len(sequence.tokens)
    missing = blocks_for(tokens + nodes) - len(sequence.pages)
    if missing > 0:
        sequence.pages += manager.allocate(min(missing, manager.available))
    return min(nodes, len(sequence.pages) * BLOCK_TOKENS - tokens)


def trim_draft_pages(manager: BlockManager, sequence: Sequence) -> None:
    """Free the pages beyond the tokens of the sequence, after a step has verified its drafts."""
    needed = blocks_for(len(sequence.tokens))
    if needed < len(sequence.pages):
        manager.release(sequence.pages[needed:])
        del sequence.pages[needed:]
        sequence.row_pages = min(sequence.row_pages, needed)


def allocate_page_ahead(manager: BlockManager, sequences: Seq[Sequence]) -> bool:
    """Give each of ``sequences``, which decode in a step that has been launched, the page for the
    step after that one. Return False, without a change, if one of them ends by its length before,
    or if pages are missing."""
    if any(len(s.tokens) + 1 >= s.request.length_limit for s in sequences):
        return False
    short = [s for s in sequences if len(s.tokens) + 1 > len(s.pages) * BLOCK_TOKENS]
    if len(short) > manager.available:
        return False
    for sequence in short:
        sequence.pages += manager.allocate(1)
    return True
