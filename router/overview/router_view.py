"""The routers in an overview: their figures added up."""

from __future__ import annotations

import msgspec

from router.overview.prometheus_text import (
    MetricsPage,
    MetricsSnapshot,
    histogram_quantile,
    matching_samples,
    sum_samples,
    to_count,
)
from router.overview.rates import RateWindow
from router.walls.binding import ROLES

QUANTILES = (0.5, 0.9, 0.99)
STAGES = ("route", "queue", "prefill", "first_emit", "wire", "scatter")


class HistogramSummary(msgspec.Struct, frozen=True):
    """Count, mean and quantiles of a histogram of seconds; None where there is no observation."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """All routers of a cluster together. Counts and rates are over the window."""

    replicas: int
    silent: int  # routers without a page
    ready: dict[str, int] = {}  # workers by role, as the router sees it that reaches most
    cut_off: int = 0  # routers that reach no decode worker while others do
    uptime_s: float | None
    running: int
    waiting: int
    requests: dict[str, int]  # finished, by status
    requests_per_s: float | None
    output_tokens_per_s: float | None
    refusals: dict[str, int]
    ttft: HistogramSummary
    tpot: HistogramSummary
    itl: HistogramSummary
    stages: dict[str, float]  # mean seconds of the stages of TTFT
    hit_ratio: float | None
    objectives: dict[str, float]  # "ttft", "tpot": seconds, the strictest where routers differ
    slo: dict[str, float]  # fraction of requests within each objective; "all": within both
    goodput_per_s: float | None  # requests within both


def router_view(
    routers: list[str], snapshot: MetricsSnapshot, window: RateWindow, now_s: float
) -> RouterView:
    """Compute the view of the targets ``routers``; ``now_s``: seconds since the epoch."""
    pages = [snapshot.pages[t] for t in routers if t in snapshot.pages]
    starts = [start for p in pages if (start := sum_samples(p, "process_start_time_seconds"))]
    ended = window.by(routers, "baton_requests_total", "status")
    met = window.by(routers, "baton_slo_met_total", "slo")
    judged = window.by(routers, "baton_slo_requests_total", "slo")
    means = {
        stage: window.mean(routers, "baton_ttft_stage_seconds", stage=stage) for stage in STAGES
    }
    reasons = window.by(routers, "baton_admission_refusals_total", "reason")
    hits, queries = (
        "baton_prefix_cache_hits_tokens_total",
        "baton_prefix_cache_queries_tokens_total",
    )
    ready = {role: counts for role in ROLES if (counts := _ready_counts(pages, role))}
    return RouterView(
        replicas=len(pages),
        silent=len(routers) - len(pages),
        ready={role: max(counts) for role, counts in ready.items()},
        cut_off=sum(not count for count in ready.get("decode", []) if any(ready["decode"])),
        uptime_s=now_s - min(starts) if starts else None,
        running=to_count(sum(sum_samples(p, "baton_requests_running") for p in pages)),
        waiting=to_count(sum(sum_samples(p, "baton_requests_waiting") for p in pages)),
        requests={status: to_count(count) for status, count in sorted(ended.items()) if count},
        requests_per_s=window.rate(routers, "baton_requests_total"),
        output_tokens_per_s=window.rate(routers, "baton_output_tokens_total"),
        refusals={reason: to_count(count) for reason, count in sorted(reasons.items()) if count},
        ttft=_histogram_summary(routers, window, "baton_time_to_first_token_seconds"),
        tpot=_histogram_summary(routers, window, "baton_request_time_per_output_token_seconds"),
        itl=_histogram_summary(routers, window, "baton_inter_token_latency_seconds"),
        stages={stage: mean for stage, mean in means.items() if mean is not None},
        hit_ratio=window.ratio(routers, hits, queries),
        objectives=_objectives(pages),
        slo={name: met.get(name, 0.0) / count for name, count in judged.items() if count},
        goodput_per_s=window.rate(routers, "baton_slo_met_total", slo="all"),
    )


def _ready_counts(pages: list[MetricsPage], role: str) -> list[int]:
    """Return the number of ready workers as each router reports it."""
    labels = {"role": role, "state": "ready"}
    found = [list(matching_samples(page, "baton_replicas", labels)) for page in pages]
    return [to_count(sum(s.value for s in samples)) for samples in found if samples]


def _histogram_summary(targets: list[str], window: RateWindow, name: str) -> HistogramSummary:
    buckets = window.buckets(targets, name)
    quantiles = [histogram_quantile(buckets, q) for q in QUANTILES]
    count = to_count(buckets[-1][1]) if buckets else 0
    return HistogramSummary(count, window.mean(targets, name), *quantiles)


def _objectives(pages: list[MetricsPage]) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in (s for page in pages for s in page.get("baton_objective_seconds", ())):
        name = sample.labels.get("slo", "")
        found[name] = min(sample.value, found.get(name, sample.value))
    return found
