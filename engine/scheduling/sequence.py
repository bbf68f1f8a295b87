"""One request inside the engine: its tokens, its phase, its pages and its row.

    generate   WAITING -> PREFILL -> DECODE -> done
    prefill    WAITING -> PREFILL -> HELD -> done      (held until dropped, while its KV is sent)
    receive    LOOKED_UP -> RESERVING -> RECEIVING -> WAITING_ROW -> DECODE -> done
    export     HELD -> done                            (computes nothing)
    import     IMPORTING -> done                       (computes nothing)

A preemption leads from PREFILL (unless the sequence will be held), DECODE or WAITING_ROW back to
WAITING, and then on like generate. Only the scheduler changes a phase, because each change is also
a move between its queues.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.page_lease import PageLease
from engine.structured_output.matcher import GrammarMatcher
from protocol.block_keys import BLOCK_TOKENS, block_keys
from protocol.requests import Logprobs, Request

Order: TypeAlias = tuple[int, float, int]
"""(priority class, time at which the request came to the cluster's decode worker, handle)."""


class Phase(enum.Enum):
    """Where a sequence is in the state machine above."""

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
    """Return the number of pages that hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class Sequence:
    """Tokens, pages and progress of one request. The engine creates it when a request arrives, and
    the scheduler drops it in ``finish``. It holds one reference on each of its pages: the scheduler
    allocates them, and ``release`` frees them when it finishes or is preempted."""

    def __init__(
        self,
        handle: int,
        request: Request,
        phase: Phase,
        hold: bool = False,
        grammar: GrammarMatcher | None = None,
        arrived_s: float = 0.0,
    ) -> None:
        """``arrived_s``: when it came to the engine, in seconds of the engine's clock. What the
        request had waited before counts, too, so that a repeated attempt keeps its place."""
        self.handle = handle
        self.request = request
        # Sort key in every queue: urgency, age, and the handle among equal ones.
        self.order: Order = (request.priority, arrived_s - request.waited_s, handle)
        # On the engine's clock: when the first token is due; inf: without a limit.
        self.token_due_s = arrived_s + request.first_token_limit_s
        self.phase = phase
        self.hold = hold  # prefill only: draw one token, then keep the pages until dropped
        self.stop_tokens = frozenset(request.sampling.stop_token_ids)
        self.allowed_tokens = frozenset(request.sampling.allowed_token_ids)  # empty: every token
        self.grammar = grammar  # advanced over the tokens so far; None: any token is allowed
        self.prompt_logprobs: list[Logprobs] = []  # computed so far, from the second token on
        self.started = False  # admitted once; a preempted sequence resumes, it does not start again
        self.expected_tokens = 0  # to be computed, as a router expects; 0: unknown
        self.expected_blocks = 0  # receive only: leading blocks that were cached at the look-up
        self.tokens = list(request.context)
        self.computed = 0  # leading tokens whose KV is in the pool
        self.cached = 0  # leading tokens whose KV came from the prefix cache at admission
        self.pages: list[int] = []
        self.lease: PageLease | None = None  # of the copy thread, while KV comes into the pages
        self.row = -1  # row of the engine's RowState while in PREFILL or DECODE
        self.row_lease = 0  # number of this stay on a row, unique in the engine
        self.row_pages = -1  # leading pages written to the row's table; -1: nothing is written yet
        self.keys: list[bytes] = []
        self.committed = 0  # leading pages that are in the prefix cache

    @property
    def remaining(self) -> int:
        """Number of tokens that a prefill still has to compute."""
        return len(self.tokens) - self.computed

    @property
    def expected_remaining(self) -> int:
        """``remaining``, but until the first admission shows what is cached, what the router
        expects. The prefixes that other sequences here will compute are not in it."""
        if self.started or not self.expected_tokens:
            return self.remaining
        return min(self.expected_tokens, self.remaining)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompt are still to be returned. They need the
        logits of every prompt token, so cached blocks cannot be used. A resumed request has them
        already."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and len(self.tokens) == len(self.request.prompt)

    def take_row(self, row: int, row_lease: int) -> None:
        """Run in ``row`` from now on; the batcher writes the row's state with the next step."""
        self.row = row
        self.row_lease = row_lease
        self.row_pages = -1

    def extend_keys(self) -> list[bytes]:
        """Return the keys of all full blocks of the tokens known so far."""
        full = len(self.tokens) // BLOCK_TOKENS
        if len(self.keys) < full:
            parent = self.keys[-1] if self.keys else self.request.cache_root
            start = len(self.keys) * BLOCK_TOKENS
            self.keys += block_keys(parent, self.tokens[start : full * BLOCK_TOKENS])
        return self.keys

    def take_pages(self, manager: BlockManager, cached: int, missing: int) -> None:
        """Pin ``cached`` leading blocks and allocate ``missing`` further pages; ``release`` frees
        all of them."""
        self.pages = manager.pin(self.keys[:cached])
        self.pages += manager.allocate(missing)
        self.computed = self.cached = cached * BLOCK_TOKENS
        self.committed = cached

    def lend_pages(self) -> None:
        """Let the copy thread write the KV of the missing blocks, until ``end_lease``."""
        self.lease = PageLease(self.handle, self.pages, self.committed)

    def end_lease(self) -> None:
        """Let the copy thread touch the pages no more. Before ``release``, and before pages that it
        wrote are committed, it must have been called; it waits for one frame at most."""
        if self.lease is not None:
            self.lease.revoke()

    def commit(self, manager: BlockManager) -> None:
        """Add the pages that have become full and computed to the prefix cache. Where another
        sequence has committed the same block, its page replaces ours, which is freed."""
        full = self.computed // BLOCK_TOKENS
        if self.committed < full:
            keys = self.extend_keys()
            for i in range(self.committed, full):
                page = manager.commit(self.pages[i], keys[i])
                if page != self.pages[i]:
                    self.pages[i] = page
                    self.row_pages = min(self.row_pages, i)
            self.committed = full

    def release(self, manager: BlockManager) -> None:
        """Give back every page; the sequence holds none afterwards."""
        self.end_lease()
        manager.release(self.pages)
        self.pages = []
        self.computed = self.cached = self.committed = 0


class BlocksInFlight:
    """Keys that running prefills will commit. Block keys chain, so one look-up tells whether a
    prefix is being computed. A prefill that ends for any reason removes its keys."""

    def __init__(self) -> None:
        self._owner: dict[bytes, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        for key in sequence.keys[sequence.committed :]:
            self._owner.setdefault(key, sequence)

    def remove(self, sequence: Sequence) -> None:
        for key in sequence.keys:
            if self._owner.get(key) is sequence:
                del self._owner[key]

    def computes(self, key: bytes, order: Order) -> bool:
        """Return whether a prefill at least as urgent as ``order`` computes the block. A less
        urgent one may have to wait itself, so it is not worth waiting for."""
        owner = self._owner.get(key)
        return owner is not None and owner.order[0] <= order[0]
