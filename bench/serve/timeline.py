"""What happened in each stretch of a run: pure functions of its records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import msgspec
import numpy as np

from bench.serve.records import Record

STRETCHES = 120
MAX_POINTS = 4000


class Timeline(msgspec.Struct, frozen=True):
    """Stretch i begins at i * ``step_s``. Rates are per second; ``in_flight`` is the mean."""

    step_s: float
    sent: list[float]
    completed: list[float]
    failed: list[float]
    output_tokens: list[float]
    in_flight: list[float]


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A request that came whole: when it was due (s), its prompt, its TTFT."""

    due: float
    prompt: int
    ttft_ms: float


def step(span_s: float) -> float:
    """0.5, 1, 2, 5, ... seconds: the least with at most STRETCHES of them."""
    found = 0.5
    for factor in cycle((2.0, 2.0, 2.5)):
        if span_s / found <= STRETCHES:
            return found
        found *= factor
    raise AssertionError


def timeline(records: Sequence[Record]) -> Timeline:
    ended = [r for r in records if r.sent >= 0]
    span = max((r.ended for r in ended), default=0.0)
    width = step(span)
    edges = np.arange(int(span / width) + 2) * width

    def rate(at: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
        counts = np.histogram(at, edges, weights=weights)[0] / width
        return [round(float(v), 4) for v in counts]

    with_tokens = [r for r in ended if r.times]
    return Timeline(
        step_s=width,
        sent=rate([r.sent for r in ended]),
        completed=rate([r.ended for r in ended if r.ok]),
        failed=rate([r.ended for r in ended if not r.ok]),
        output_tokens=rate(
            [at for r in with_tokens for at in r.times],
            [r.output / len(r.times) for r in with_tokens for _ in r.times],
        ),
        in_flight=_in_flight(ended, edges),
    )


def _in_flight(records: Sequence[Record], edges: np.ndarray) -> list[float]:
    """The integral of the number in flight over each stretch, by its length: at each edge, the sum
    of all time spent in flight until then."""
    sent = np.sort([r.sent for r in records])
    ended = np.sort([r.ended for r in records])

    def spent(since: np.ndarray) -> np.ndarray:
        """Sum of max(0, edge - t) over ``since``, sorted."""
        before = np.searchsorted(since, edges)
        sums: np.ndarray = np.concatenate([[0.0], np.cumsum(since)])[before]
        return np.asarray(before * edges - sums)

    mean = np.diff(spent(sent) - spent(ended)) / np.diff(edges)
    return [round(float(v), 4) for v in mean]


def points(records: Sequence[Record]) -> list[Point]:
    """At most MAX_POINTS, evenly chosen in the order of time."""
    found = [
        Point(r.due, r.prompt_counted or r.prompt, 1e3 * r.ttft)
        for r in records
        if r.ok and r.ttft is not None
    ]
    return found[:: max(1, -(-len(found) // MAX_POINTS))]
