"""All routers together, as an overview shows them."""

from __future__ import annotations

import msgspec

from router.overview.prometheus_text import Moment, Page, gauge, matching, quantile, whole
from router.overview.rates import Window

QUANTILES = (0.5, 0.9, 0.99)
STAGES = ("route", "queue", "prefill", "first_emit", "wire", "scatter")


class Spread(msgspec.Struct, frozen=True):
    """Of a histogram."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """All routers together."""

    replicas: int
    silent: int  # routers whose page cannot be had
    ready: dict[str, int] = {}  # workers by role, of the router that reaches most
    cut_off: int = 0  # routers that reach no decode worker, where others do
    uptime_s: float | None
    running: int
    waiting: int
    requests: dict[str, int]  # ended, by status
    requests_per_s: float | None
    output_tokens_per_s: float | None
    refusals: dict[str, int]
    ttft: Spread
    tpot: Spread
    itl: Spread
    stages: dict[str, float]  # means
    hit_ratio: float | None
    objectives: dict[str, float]  # "ttft", "tpot": seconds; the strictest, where routers differ
    slo: dict[str, float]  # fraction of requests within each objective; "all": within both
    goodput_per_s: float | None  # requests within both


def router_view(routers: list[str], moment: Moment, window: Window, now_s: float) -> RouterView:
    pages = [moment.pages[t] for t in routers if t in moment.pages]
    starts = [start for p in pages if (start := gauge(p, "process_start_time_seconds"))]
    ended = window.by(routers, "baton_requests_total", "status")
    met = window.by(routers, "baton_slo_met_total", "slo")
    of = window.by(routers, "baton_slo_requests_total", "slo")
    means = {
        stage: window.mean(routers, "baton_ttft_stage_seconds", stage=stage) for stage in STAGES
    }
    reasons = window.by(routers, "baton_admission_refusals_total", "reason")
    hits, asked = "baton_prefix_cache_hits_tokens_total", "baton_prefix_cache_queries_tokens_total"
    ready = {role: counts for role in ("prefill", "decode") if (counts := _ready(pages, role))}
    return RouterView(
        replicas=len(pages),
        silent=len(routers) - len(pages),
        ready={role: max(counts) for role, counts in ready.items()},
        cut_off=sum(not count for count in ready.get("decode", []) if any(ready["decode"])),
        uptime_s=now_s - min(starts) if starts else None,
        running=whole(sum(gauge(p, "baton_requests_running") for p in pages)),
        waiting=whole(sum(gauge(p, "baton_requests_waiting") for p in pages)),
        requests={status: whole(count) for status, count in sorted(ended.items()) if count},
        requests_per_s=window.rate(routers, "baton_requests_total"),
        output_tokens_per_s=window.rate(routers, "baton_output_tokens_total"),
        refusals={reason: whole(count) for reason, count in sorted(reasons.items()) if count},
        ttft=_spread(routers, window, "baton_time_to_first_token_seconds"),
        tpot=_spread(routers, window, "baton_request_time_per_output_token_seconds"),
        itl=_spread(routers, window, "baton_inter_token_latency_seconds"),
        stages={stage: mean for stage, mean in means.items() if mean is not None},
        hit_ratio=window.ratio(routers, hits, asked),
        objectives=_objectives(pages),
        slo={name: met.get(name, 0.0) / count for name, count in of.items() if count},
        goodput_per_s=window.rate(routers, "baton_slo_met_total", slo="all"),
    )


def _ready(pages: list[Page], role: str) -> list[int]:
    """Workers that are ready, as each router has it that tells."""
    of = {"role": role, "state": "ready"}
    found = [list(matching(page, "baton_replicas", of)) for page in pages]
    return [whole(sum(s.value for s in samples)) for samples in found if samples]


def _spread(targets: list[str], window: Window, name: str) -> Spread:
    buckets = window.buckets(targets, name)
    quantiles = [quantile(buckets, q) for q in QUANTILES]
    count = whole(buckets[-1][1]) if buckets else 0
    return Spread(count, window.mean(targets, name), *quantiles)


def _objectives(pages: list[Page]) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in (s for page in pages for s in page.get("baton_objective_seconds", ())):
        name = sample.labels.get("slo", "")
        found[name] = min(sample.value, found.get(name, sample.value))
    return found
