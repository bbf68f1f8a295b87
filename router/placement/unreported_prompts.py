"""Prompts that are on their way to a worker: sent, and in none of its reports yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Set

UNREPORTED_S = 0.5
"""A prompt that no report has named after this time is in the reports, or will never come: workers
report at least so often (``HEARTBEAT_S`` in decode_worker/router_link.py)."""

MOST_REMEMBERED = 1024
"""Prompts of one worker that are remembered; further ones count when they are reported."""


class UnreportedPrompts:
    """Prompts sent to one worker. A report names the latest ones that it contains by their digests
    (``request_digest``)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By digest, the oldest first: until when, and tokens to be computed.
        self._prompts: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._reported: Set[int] = frozenset()  # named by the last report
        self._tokens = 0

    def add(self, digest: int, tokens: int) -> None:
        """Remember a prompt, unless the last report contains it."""
        if (
            digest in self._reported
            or digest in self._prompts
            or len(self._prompts) >= MOST_REMEMBERED
        ):
            return
        self._prompts[digest] = self._clock() + UNREPORTED_S, tokens
        self._tokens += tokens

    def drop(self, digest: int) -> None:
        _, tokens = self._prompts.pop(digest, (0.0, 0))
        self._tokens -= tokens

    def record_report(self, latest: Collection[int] | None) -> None:
        """Forget the prompts that a report contains; None: all of them, as it names none."""
        if latest is None:
            self.clear()
            return
        self._reported = frozenset(latest)
        for digest in self._prompts.keys() & self._reported:
            self.drop(digest)

    def totals(self) -> tuple[int, int]:
        """Return the tokens that are to be computed, and the prompts that they are of."""
        while self._prompts:
            digest, (until, _) = next(iter(self._prompts.items()))
            if until > self._clock():
                break
            self.drop(digest)
        return self._tokens, len(self._prompts)

    def clear(self) -> None:
        self._prompts.clear()
        self._tokens, self._reported = 0, frozenset()
