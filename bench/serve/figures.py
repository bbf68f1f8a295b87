"""The figures of a run: pure functions of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from bench.serve.records import Record

LATENCIES: dict[str, str] = {
    "ttft_ms": "TTFT",
    "ttft_from_sent_ms": "TTFT from sending",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2e_ms": "E2E",
    "e2e_from_sent_ms": "E2E from sending",
}
GRID = tuple(np.concatenate([np.arange(0, 0.99, 0.005), np.arange(0.99, 1.0001, 0.001)]).round(4))
"""Shares at which distributions are kept, for plots."""


class Quantiles(msgspec.Struct, frozen=True):
    """Of ``count`` values, by nearest rank: the least value that so many are at most."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """None of none."""
    if not values:
        return None
    shares = np.quantile(values, (0.5, 0.9, 0.95, 0.99, 1.0), method="inverted_cdf")
    return Quantiles(len(values), float(np.mean(values)), *map(float, shares))


def distribution(values: Sequence[float]) -> list[float]:
    """The values at the shares of GRID."""
    if not values:
        return []
    return [float(v) for v in np.quantile(values, GRID, method="inverted_cdf")]


class Objectives(msgspec.Struct, frozen=True):
    """Upper bounds, in ms; None: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met(self, record: Record) -> bool:
        """A request that failed meets none; one of a single token has no TPOT to miss."""
        ttft, tpot = record.ttft, record.tpot
        return (
            record.ok
            and (self.ttft_ms is None or (ttft is not None and 1e3 * ttft <= self.ttft_ms))
            and (self.tpot_ms is None or tpot is None or 1e3 * tpot <= self.tpot_ms)
        )

    def any(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


class Summary(msgspec.Struct, frozen=True):
    """Rates are per second of ``span_s``: from when the first request was due to the last end.
    Latencies are of requests that came whole. ``goodput``: requests that met the objectives."""

    requests: int
    ok: int
    errors: dict[str, int]
    interrupted: int
    span_s: float
    offered_rate: float | None
    sent_rate: float
    achieved_rate: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput: float | None
    good_share: float | None
    latencies: dict[str, Quantiles]
    prompt_tokens: Quantiles | None
    output_tokens: Quantiles | None
    tokens_per_arrival: float | None
    cached_share: float | None
    short_outputs: int
    messages: dict[str, str]


def latencies(records: Iterable[Record]) -> dict[str, list[float]]:
    """In ms, of requests that came whole; ITL of all their gaps together."""
    ok = [r for r in records if r.ok]

    def ms(of: Callable[[Record], float | None]) -> list[float]:
        return [1e3 * v for v in map(of, ok) if v is not None]

    return {
        "ttft_ms": ms(lambda r: r.ttft),
        "ttft_from_sent_ms": ms(lambda r: r.ttft_from_sent),
        "tpot_ms": ms(lambda r: r.tpot),
        "itl_ms": [1e3 * gap for r in ok for gap in r.gaps],
        "e2e_ms": ms(lambda r: r.ended - r.due),
        "e2e_from_sent_ms": ms(lambda r: r.ended - r.sent),
    }


def offered_rate(records: Sequence[Record]) -> float | None:
    """Arrivals per second, by the times when they were due: n - 1 gaps."""
    span = records[-1].due - records[0].due if records else 0.0
    return (len(records) - 1) / span if span > 0 else None


def summarise(records: Sequence[Record], goal: Objectives, open_loop: bool) -> Summary:
    """``records``: in the order in which they were due."""
    counted = [r for r in records if r.sent >= 0]
    ended = [r for r in counted if r.error != "interrupted"]
    ok = [r for r in ended if r.ok]
    span = max((r.ended for r in counted), default=0.0) - min((r.due for r in counted), default=0.0)
    per_s = 1 / span if span > 0 else 0.0
    good = sum(map(goal.met, ended))
    known = [r for r in ok if r.cached is not None and r.prompt_counted]
    arrived = [r for r in ok if r.times]
    return Summary(
        requests=len(counted),
        ok=len(ok),
        errors=dict(Counter(r.error for r in ended if not r.ok).most_common()),
        interrupted=len(counted) - len(ended),
        span_s=span,
        offered_rate=offered_rate(records) if open_loop else None,
        sent_rate=len(counted) * per_s,
        achieved_rate=len(ok) * per_s,
        output_tokens_per_s=sum(r.output for r in ok) * per_s,
        prompt_tokens_per_s=sum(r.prompt_counted or r.prompt for r in ok) * per_s,
        goodput=good * per_s if goal.any() else None,
        good_share=good / len(ended) if goal.any() and ended else None,
        latencies={k: q for k, v in latencies(ok).items() if (q := quantiles(v))},
        prompt_tokens=quantiles([r.prompt_counted or r.prompt for r in ok]),
        output_tokens=quantiles([r.output for r in ok]),
        tokens_per_arrival=(
            sum(r.output for r in arrived) / sum(len(r.times) for r in arrived) if arrived else None
        ),
        cached_share=(
            sum(r.cached or 0 for r in known) / sum(r.prompt_counted or 0 for r in known)
            if known
            else None
        ),
        short_outputs=sum(r.output < r.asked for r in ok),
        messages={r.error: r.message for r in reversed(ended) if not r.ok and r.message},
    )
