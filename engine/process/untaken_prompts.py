"""The prompts that an engine has not taken yet, and the latest that the front has sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LATEST_PROMPTS = 32
"""So many are named whatever their age: loads of an idle worker are rare, and may be late."""

NAMED_S = 1.0
"""Younger prompts are named, too, because many may come between two loads. Twice as long as routers
count a prompt beside a load that does not name it (``UNREPORTED_S`` in router/placement): a load of
a busy front may be late."""

MOST_NAMED = 1024
"""As many as routers take of a load (``MOST_NAMED`` in router/placement/ledger.py): 4 KB of it."""


class LatestPrompts:
    """Digests of the prompts that were sent to one engine last (``request_digest``)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent: deque[tuple[float, int]] = deque(maxlen=MOST_NAMED)  # when, and digest

    def add(self, digest: int) -> None:
        self._sent.append((self._clock(), digest))

    def digests(self) -> tuple[int, ...]:
        """Return the prompts that a load names now, oldest first."""
        since = self._clock() - NAMED_S
        while len(self._sent) > LATEST_PROMPTS and self._sent[0][0] < since:
            self._sent.popleft()
        return tuple(digest for _, digest in self._sent)


class UntakenPrompts:
    """Counts them until a beat says that the engine has taken them and counts them itself.

    An engine takes commands between two steps, and a step may last for half a second, in which
    several routers would each find the worker as idle as it was before. It takes them in their
    order.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = 0  # of the prompts, that are expected to be computed
        self._waiting: deque[int] = deque()  # tokens of each
        self._taken = 0  # by the engine, so far
        self.latest = LatestPrompts(clock)  # also those that are taken

    @property
    def prompts(self) -> int:
        return len(self._waiting)

    def add(self, tokens: int, digest: int) -> None:
        """Count a prompt that has been sent. ``digest``: of its request's id
        (``request_digest``)."""
        self.latest.add(digest)
        self._waiting.append(tokens)
        self.tokens += tokens

    def drop_taken(self, taken: int) -> None:
        """Forget the prompts that the engine has taken; ``taken``: since its start."""
        while self._taken < taken and self._waiting:
            self._taken += 1
            self.tokens -= self._waiting.popleft()
