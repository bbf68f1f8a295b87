"""The KV pool of a simulated worker: what live sequences hold, and who waits for room.

``SimulatedWorker`` creates one, and its steps tell it what decoding adds. A block of a prefix takes
room once, from when the first live sequence holds it until the last one that does is gone.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from operator import attrgetter

from cluster.simulator.devices.cache import CACHE_BLOCK_TOKENS, SimulatedCache
from cluster.simulator.devices.request import SimulatedRequest


class KvReservations:
    """What live sequences hold of a worker's KV pool, and the requests that wait for room.

    ``requests``: the tokens that each request of the worker began with. ``tokens``: size of the
    pool; 0 means unlimited. ``on_reserved`` is called for each request that gets room, the oldest
    of those that wait first, after ``preempted`` ones. ``promised_tokens``: what requests that
    decode here are still to take. The rest of the pool is prefix cache.
    """

    def __init__(
        self, tokens: int, cache: SimulatedCache, on_reserved: Callable[[SimulatedRequest], None]
    ) -> None:
        self.requests: dict[SimulatedRequest, int] = {}
        # Those that are not computed again yet: tokens that are still cached.
        self.preempted: dict[SimulatedRequest, float] = {}
        self._added = 0.0
        self.used_tokens = 0
        self.grown = 0  # of them: tokens that decoding has added
        self.promised_tokens = 0
        self._promised: dict[SimulatedRequest, int] = {}
        self.cache = cache
        self._holders: dict[bytes, int] = {}  # live sequences by block
        self._tokens = tokens
        self._on_reserved = on_reserved
        self._waiting: list[SimulatedRequest] = []  # by age

    def fits(self, request: SimulatedRequest, tokens: int) -> bool:
        """Return whether ``tokens`` of a request fit beside the blocks that live sequences hold; a
        single request does, as admission checked its length."""
        free = self.free_tokens
        return not self.used_tokens or tokens <= free or self._missing(request, tokens) <= free

    def _missing(self, request: SimulatedRequest, tokens: int) -> int:
        blocks = request.blocks
        held = bisect.bisect_left(blocks, True, key=lambda block: block not in self._holders)
        return tokens - held * CACHE_BLOCK_TOKENS

    @property
    def free_tokens(self) -> float:
        return self._tokens - self.used_tokens if self._tokens else math.inf

    @property
    def awaited_tokens(self) -> int:
        """Tokens that requests wait for."""
        return sum(request.pool_tokens for request in self._waiting)

    def grow(self, tokens: int) -> None:
        """Set how many tokens decoding has added to what the requests began with."""
        more = tokens - self.grown
        if more:
            self.grown = tokens
            self.used_tokens += more
            self.cache.reserve(more)

    def promise(self, request: SimulatedRequest) -> None:
        """Count the tokens of a request that will decode here until it takes them or leaves."""
        self.requests[request] = 0
        self._promised[request] = request.pool_tokens
        self.promised_tokens += request.pool_tokens

    def _end_promise(self, request: SimulatedRequest) -> None:
        self.promised_tokens -= self._promised.pop(request, 0)

    def take(self, request: SimulatedRequest, tokens: int) -> None:
        self._end_promise(request)
        self.preempted.pop(request, None)
        self.requests[request] = tokens
        unhashed, holders, new = _unhashed_tokens(request, tokens), self._holders, 0
        for block in request.blocks:
            before = holders.get(block, 0)
            holders[block] = before + 1
            new += not before
        self.used_tokens += unhashed + new * CACHE_BLOCK_TOKENS
        self.cache.reserve(unhashed)

    def _free(self, request: SimulatedRequest, tokens: int) -> None:
        unhashed, holders, gone = _unhashed_tokens(request, tokens), self._holders, 0
        for block in request.blocks:
            holders[block] -= 1
            if not holders[block]:
                del holders[block]
                gone += 1
        self.used_tokens -= unhashed + gone * CACHE_BLOCK_TOKENS
        self.cache.reserve(-unhashed)

    def release(self, request: SimulatedRequest) -> bool:
        """Drop a request; return whether this freed tokens, which waiting requests then get."""
        tokens = self.requests.pop(request, 0)
        self._end_promise(request)
        self.preempted.pop(request, None)
        if not tokens:
            return False
        self._free(request, tokens)
        self.serve_waiting()
        return True

    def serve_waiting(self) -> None:
        while self._waiting and not self.preempted and self._fits_whole(self._waiting[0]):
            self._reserve(self._waiting.pop(0))

    def _fits_whole(self, request: SimulatedRequest) -> bool:
        return self.fits(request, request.pool_tokens)

    def preempt(self, request: SimulatedRequest, computed: int, added: float) -> None:
        """Take back all tokens of a request, which stays and comes before those that wait.
        ``computed``: of them, so they are cached now; ``added``: by all decode steps so far."""
        self.evict_preempted(added)
        self.preempted[request] = computed
        tokens, self.requests[request] = self.requests[request], 0
        self._free(request, tokens)

    def evict_preempted(self, added: float) -> None:
        """Evict what decoding has added from the preempted requests: nothing else is unused in a
        full pool. The blocks of the first one that was preempted are the oldest."""
        tokens, self._added = added - self._added, added
        for request, cached in self.preempted.items():
            lost = min(tokens, cached)
            self.preempted[request] -= lost
            tokens -= lost

    def reserve(self, request: SimulatedRequest) -> None:
        """Reserve all tokens that the request will hold, now or when there is room."""
        if not self.preempted and not self._waiting and self._fits_whole(request):
            self._reserve(request)
        else:
            bisect.insort(self._waiting, request, key=attrgetter("age"))

    def _reserve(self, request: SimulatedRequest) -> None:
        self.take(request, request.pool_tokens)
        self._on_reserved(request)

    def stop_waiting(self, request: SimulatedRequest) -> None:
        if request in self._waiting:
            self._waiting.remove(request)


def _unhashed_tokens(request: SimulatedRequest, tokens: int) -> int:
    """Return how many of a request's ``tokens`` are in no block."""
    return max(0, tokens - len(request.blocks) * CACHE_BLOCK_TOKENS)
