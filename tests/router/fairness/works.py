"""Requests for tests of the queue."""

from __future__ import annotations

from router.common.errors import ApiError
from router.fairness.fair_queue import RoutedWork
from router.fairness.virtual_counters import ExpectedCost
from router.placement.cost import DecodeTerms, Placement, PrefillTerms


def placement(
    worker: str = "p", queue_s: float = 0.0, wait_s: float = 0.0, *, local: bool = False,
    is_short: bool = False,
) -> Placement:  # fmt: skip
    """A placement whose prompt takes 1 s after ``queue_s``, and that waits ``wait_s`` for a row.
    ``local``: ``worker`` decodes, too."""
    p = PrefillTerms(worker, 0, None, queue_s, 1.0, queue_s + 1.0, 1.0, 1, 0.0, 0.0, is_short)
    d = DecodeTerms("d", 0, 1, 0, 0.0, 0.01, wait_s, 0.0, 0.0, True)
    ttft_s = queue_s + 1.0
    return Placement(
        None if local else worker, p, d, 0.0, ttft_s, 0.0, ttft_s, 0.01, 0.0, 0.0, 0.0, 0.0
    )


class UnusedWork:
    """Work that is neither placed nor dispatched."""

    prompt_tokens = 100

    def place(self, *, ahead: bool = False) -> RoutedWork | None:
        raise AssertionError

    def dispatch(self) -> None:
        raise AssertionError

    def refuse(self, error: ApiError) -> None:
        raise AssertionError


class FakeWork:
    """Work that goes where ``now`` says, or ``ahead_now`` if it goes ahead of others. It sees all
    prompts of the worker unless ``batched_s`` says that there are others, which are less urgent."""

    def __init__(self, now: Placement | None, tokens: float = 100.0) -> None:
        self.now = now
        self.ahead_now: Placement | None = None
        self.placed = 0
        self.dispatched: bool | None = None  # whether it went ahead
        self.error: ApiError | None = None
        self.fails = False
        self.batched_s = 0.0
        self.prompt_tokens = round(tokens)
        self._cost = ExpectedCost(tokens, 0)
        self._ahead = False

    def place(self, *, ahead: bool = False) -> RoutedWork | None:
        self.placed += 1
        self._ahead = ahead
        now = self.ahead_now if ahead else self.now
        return (
            None if now is None else RoutedWork(now, max(now.p.queue_s, self.batched_s), self._cost)
        )

    def dispatch(self) -> None:
        if self.fails:
            raise RuntimeError
        self.dispatched = self._ahead

    def refuse(self, error: ApiError) -> None:
        self.error = error

    def was_sent(self) -> bool:
        return self.dispatched is not None
