"""Who takes a request: pure functions of a snapshot.

For now by load alone. Own work is counted exactly; what other routers have in a worker is what it
reports minus what of it was our own when it reported, so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

MAX_PREFILL = 3
"""Prefill workers named to the decode worker: the best, and who to turn to if it fails."""


class DecodeView(NamedTuple):
    """A decode worker whose stream is up."""

    instance: str
    own: int  # requests this router has in it
    reported: int  # requests it last reported, running and waiting
    own_at_report: int  # those of them that were this router's
    queued_tokens: int  # prompt tokens it last reported as not yet computed
    kv_free: int  # tokens its pool can take
    kv_total: int  # 0: it has not said yet
    draining: bool


class PrefillView(NamedTuple):
    """A prefill worker in the directory."""

    instance: str
    outstanding: int  # prompt tokens this router sent it that have brought no first token yet
    queued_tokens: int  # as it last reported, of every router
    draining: bool


def load(view: DecodeView) -> int:
    """Requests in the worker, as well as this router can tell."""
    return view.own + max(0, view.reported - view.own_at_report)


def pick_decode(
    views: Iterable[DecodeView], tokens: int, avoid: Collection[str] = ()
) -> str | None:
    """The decode worker for a request of ``tokens`` tokens in all; None when there is none.

    One that lacks room now comes after those that have it: it can still queue the request. One in
    ``avoid`` (it failed this very request before) is taken only when there is no other.
    """

    def badness(view: DecodeView) -> tuple[bool, bool, int, int, str]:
        full = view.kv_total > 0 and view.kv_free < tokens
        return (view.instance in avoid, full, load(view), view.queued_tokens, view.instance)

    open_to_work = [view for view in views if not view.draining]
    return min(open_to_work, key=badness).instance if open_to_work else None


def order_prefill(views: Iterable[PrefillView]) -> list[str]:
    """The best prefill workers first; none that drains."""
    ready = [view for view in views if not view.draining]
    ready.sort(key=lambda view: (view.outstanding, view.queued_tokens, view.instance))
    return [view.instance for view in ready[:MAX_PREFILL]]
