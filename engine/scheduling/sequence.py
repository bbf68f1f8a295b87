"""One request inside the engine.

    generate   WAITING -> PREFILL -> DECODE -> done
    prefill    WAITING -> PREFILL -> HELD -> done                (held until released: KV goes out)
    receive    LOOKED_UP -> RESERVING -> RECEIVING -> WAITING_ROW -> DECODE -> done
    export     HELD -> done                                      (computes nothing)
    import     IMPORTING -> done                                 (computes nothing)

Preempted in PREFILL (unless it is to be held), DECODE or WAITING_ROW: -> WAITING, like generate.
Whoever moves a sequence to another phase also moves it between the scheduler's queues.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq

from engine.kv_cache.block_manager import BlockManager
from engine.structured_output.matcher import Matcher
from protocol.block_keys import BLOCK_TOKENS, block_keys
from protocol.requests import Logprobs, Request


class Phase(enum.Enum):
    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    HELD = enum.auto()
    LOOKED_UP = enum.auto()
    RESERVING = enum.auto()
    RECEIVING = enum.auto()
    WAITING_ROW = enum.auto()
    IMPORTING = enum.auto()


def blocks_for(tokens: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class Sequence:
    """Tokens, pages and progress of one request. Its pages are released by ``release``."""

    def __init__(
        self,
        handle: int,
        request: Request,
        phase: Phase,
        hold: bool = False,
        grammar: Matcher | None = None,
    ) -> None:
        self.handle = handle
        self.request = request
        self.order = (request.priority, handle)  # who comes first, in every queue
        self.phase = phase
        self.hold = hold  # prefill only: one token, then the pages are kept until released
        self.stop_tokens = frozenset(request.sampling.stop_token_ids)
        self.grammar = grammar  # after the tokens so far; None: any token may come
        self.prompt_logprobs: list[Logprobs] = []  # as far as computed, from the second token on
        self.started = False  # admitted once; a preempted sequence starts only once
        self.expected = 0  # received: leading blocks that were cached when it was looked up
        self.tokens = list(request.context)
        self.computed = 0  # leading tokens whose KV is in the pool
        self.cached = 0  # of these, taken from the prefix cache at admission
        self.pages: list[int] = []
        self.row = -1  # row in the state table while in PREFILL or DECODE
        self.seating = 0  # number of its stay on the row; no other stay has it
        self.seated_pages = -1  # leading pages that its row knows; -1: the row knows nothing
        self.keys: list[bytes] = []
        self.committed = 0  # leading pages whose key is declared

    @property
    def remaining(self) -> int:
        """Tokens that a prefill still has to compute."""
        return len(self.tokens) - self.computed

    @property
    def scores(self) -> bool:
        """Its prompt's log-probabilities are wanted, and so all of its logits: what is cached is of
        no use. Whoever resumes it has them."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and len(self.tokens) == len(self.request.prompt)

    def take_row(self, row: int, seating: int) -> None:
        """Run in ``row`` from now on; the row's state is written when the next step is built."""
        self.row = row
        self.seating = seating
        self.seated_pages = -1

    def extend_keys(self) -> list[bytes]:
        """Keys of all full blocks of the tokens known so far."""
        full = len(self.tokens) // BLOCK_TOKENS
        if len(self.keys) < full:
            parent = self.keys[-1] if self.keys else self.request.cache_root
            start = len(self.keys) * BLOCK_TOKENS
            self.keys += block_keys(parent, self.tokens[start : full * BLOCK_TOKENS])
        return self.keys

    def commit(self, manager: BlockManager) -> None:
        """Declare the pages that have become full and computed since the last call. Where another
        sequence has computed the same block meanwhile, its page takes the place of ours."""
        full = self.computed // BLOCK_TOKENS
        if self.committed < full:
            keys = self.extend_keys()
            for i in range(self.committed, full):
                page = manager.commit(self.pages[i], keys[i])
                if page != self.pages[i]:
                    self.pages[i] = page
                    self.seated_pages = min(self.seated_pages, i)
            self.committed = full

    def release(self, manager: BlockManager) -> None:
        """Give every page back; the sequence holds nothing afterwards."""
        manager.release(self.pages)
        self.pages = []
        self.computed = self.cached = self.committed = 0

    def take_pages(self, manager: BlockManager, cached: int, missing: int) -> None:
        """Start from ``cached`` blocks, with ``missing`` pages more (all pinned here)."""
        self.pages = manager.pin(self.keys[:cached])
        self.pages += manager.allocate(missing)
        self.computed = self.cached = cached * BLOCK_TOKENS
        self.committed = cached


# MERGED engine.draft_pages
# Pages for what is proposed: taken before a step, given back in it. Torch-free.
#
# Drafts never cost anybody a page that it runs on: they take what is free or evictable, and where
# that is not enough there are fewer of them. There are never more in a step than its memory was
# counted for (engine/execution/memory_footprint.py).

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
