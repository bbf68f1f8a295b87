"""What a cluster made of a sequence of phases: objectives met, workers paid for, time to react."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from bench.autoscale_phases import Span
from bench.open_loop import Answer, Objective

WINDOW_S = 5.0
GOOD = 0.9
"""Share of a window's requests that meet both objectives where all is well again."""


class Look(NamedTuple):
    """The cluster at a time. ``paid``: workers from the moment they are asked for until they are
    gone; ``prefill``, ``decode``: those that take requests of that role."""

    at: float  # seconds after the beginning
    paid: int
    prefill: int
    decode: int


class Figures(NamedTuple):
    """Shares are of all requests that were due; one that failed or was refused meets nothing."""

    seconds: float
    requests: int
    ttft: float
    tpot: float
    both: float
    failed: float  # share, without those refused
    refused: float
    worker_seconds: float
    goodput: float  # requests a second that met both
    per_worker_second: float  # requests that met both

    @property
    def mean_workers(self) -> float:
        return self.worker_seconds / self.seconds


def figures(
    answers: Sequence[Answer], looks: Sequence[Look], span: Span, goal: Objective
) -> Figures:
    due = [a for a in answers if span.begin <= a.at < span.end]
    count = max(1, len(due))
    good = sum(a.meets(goal) for a in due)
    paid = worker_seconds(looks, span)
    return Figures(
        span.seconds,
        len(due),
        sum(a.status == 200 and a.ttft_s <= goal.ttft_s for a in due) / count,
        sum(a.status == 200 and a.tpot_s <= goal.tpot_s for a in due) / count,
        good / count,
        sum(a.status not in (200, 429) for a in due) / count,
        sum(a.status == 429 for a in due) / count,
        paid,
        good / span.seconds,
        good / paid if paid else 0.0,
    )


def worker_seconds(looks: Sequence[Look], span: Span) -> float:
    """What a look saw holds until the next one."""
    last = Look(span.end, 0, 0, 0)
    total = 0.0
    for look, following in pairwise([*looks, last]):
        begin, end = max(look.at, span.begin), min(following.at, span.end)
        total += look.paid * max(0.0, end - begin)
    return total


def acts_after(looks: Sequence[Look], span: Span) -> float | None:
    """Seconds from the beginning of a phase until a role had another number of workers."""
    before = [look for look in looks if look.at <= span.begin]
    if not before:
        return None
    first = before[-1]
    for look in looks:
        changed = (look.prefill, look.decode) != (first.prefill, first.decode)
        if span.begin < look.at < span.end and changed:
            return look.at - span.begin
    return None


def good_after(answers: Sequence[Answer], span: Span, goal: Objective) -> float | None:
    """Seconds from the beginning of a phase until those that were due from then on, window by
    window, met both objectives; None: never. A window without requests is good."""
    bad_until = 0.0
    windows = int(span.seconds / WINDOW_S)
    for i in range(windows):
        begin = span.begin + i * WINDOW_S
        due = [a for a in answers if begin <= a.at < begin + WINDOW_S]
        if due and sum(a.meets(goal) for a in due) < GOOD * len(due):
            bad_until = (i + 1) * WINDOW_S
    return bad_until if bad_until < windows * WINDOW_S else None
