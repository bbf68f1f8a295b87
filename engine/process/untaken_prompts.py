"""The prompts that an engine has not taken yet, and the latest that the front has sent."""

from __future__ import annotations

from collections import deque

LATEST_PROMPTS = 32
"""More than a worker is sent between two reports of its load, which are a few hundredths of a
second apart if many prompts come."""


class UntakenPrompts:
    """Counts them until a beat says that the engine has taken them and counts them itself.

    An engine takes commands between two steps, and a step may last for half a second, in which
    several routers would each find the worker as idle as it was before. It takes them in their
    order.
    """

    def __init__(self) -> None:
        self.tokens = 0  # of the prompts, that are expected to be computed
        self._waiting: deque[int] = deque()  # tokens of each
        self._taken = 0  # by the engine, so far
        self.latest: deque[int] = deque(maxlen=LATEST_PROMPTS)  # digests, also of taken ones

    @property
    def prompts(self) -> int:
        return len(self._waiting)

    def add(self, tokens: int, digest: int) -> None:
        """Count a prompt that has been sent. ``digest``: of its request's id
        (``request_digest``)."""
        self.latest.append(digest)
        self._waiting.append(tokens)
        self.tokens += tokens

    def drop_taken(self, taken: int) -> None:
        """Forget the prompts that the engine has taken; ``taken``: since its start."""
        while self._taken < taken and self._waiting:
            self._taken += 1
            self.tokens -= self._waiting.popleft()
