"""What `baton status` and ``/ui`` show, worked out from the pages: an Overview.

``None`` stands for what was not observed, or cannot be told from one look. Times in seconds.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from router.overview.fetch import Group, Seen
from router.overview.figures import Moment, Page, Window, gauge, quantile
from router.overview.speculation import SpeculationView, speculation

WorkerState: TypeAlias = Literal["ready", "draining", "down", "silent"]

QUANTILES = (0.5, 0.9, 0.99)
STAGES = ("route", "queue", "prefill", "first_emit", "wire", "scatter")


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. ``silent``: in the directory, but its page cannot be had (``why``)."""

    instance: str
    role: str
    target: str
    state: WorkerState
    why: str = ""
    pid: int | None = None
    engine_pid: int | None = None
    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    kv_usage: float | None = None
    kv_tokens: int = 0
    hit_ratio: float | None = None
    tokens_per_s: float | None = None  # computed on prefill workers, generated on decode workers
    received_bytes_per_s: float | None = None
    step_s: float | None = None  # mean
    memory_bytes: int = 0  # front and engine
    engine_restarts: int = 0
    speculation: SpeculationView | None = None  # None: off


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
    slo: dict[str, float]  # fraction of requests within each objective; "all": within both
    goodput_per_s: float | None  # requests within both


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """``window_s``: what rates, times and ratios are of; None: since each process started."""

    cluster: str
    model: str
    url: str
    window_s: float | None
    router: RouterView
    workers: list[WorkerView]


def overview(url: str, seen: Seen, before: Moment | None, now_s: float) -> Overview:
    """``before``: the beginning of the window. ``now_s``: since the epoch, for the uptime."""
    window = Window(seen.moment, before)
    of = [g for g in seen.groups if g.about("role") == "router"]
    routers = [g.target for g in of]
    workers = [g for g in seen.groups if g.about("role") in ("prefill", "decode")]
    views = [_worker(g, seen, window) for g in workers]
    first = seen.groups[0] if seen.groups else None
    return Overview(
        cluster=first.about("cluster") if first else "",
        model=first.about("model") if first else "",
        url=url,
        window_s=window.seconds,
        router=_router(routers, seen.moment, window, now_s),
        workers=sorted(views, key=lambda w: (w.role != "prefill", w.instance)),
    )


def _router(routers: list[str], moment: Moment, window: Window, now_s: float) -> RouterView:
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
    return RouterView(
        replicas=len(pages),
        uptime_s=now_s - min(starts) if starts else None,
        running=sum(int(gauge(p, "baton_requests_running")) for p in pages),
        waiting=sum(int(gauge(p, "baton_requests_waiting")) for p in pages),
        requests={status: round(count) for status, count in sorted(ended.items()) if count},
        requests_per_s=window.rate(routers, "baton_requests_total"),
        output_tokens_per_s=window.rate(routers, "baton_output_tokens_total"),
        refusals={reason: round(count) for reason, count in sorted(reasons.items()) if count},
        ttft=_spread(routers, window, "baton_time_to_first_token_seconds"),
        tpot=_spread(routers, window, "baton_request_time_per_output_token_seconds"),
        itl=_spread(routers, window, "baton_inter_token_latency_seconds"),
        stages={stage: mean for stage, mean in means.items() if mean is not None},
        hit_ratio=window.ratio(routers, hits, asked),
        slo={name: met.get(name, 0.0) / count for name, count in of.items() if count},
        goodput_per_s=window.rate(routers, "baton_slo_met_total", slo="all"),
    )


def _spread(targets: list[str], window: Window, name: str) -> Spread:
    buckets = window.buckets(targets, name)
    quantiles = [quantile(buckets, q) for q in QUANTILES]
    count = round(buckets[-1][1]) if buckets else 0
    return Spread(count, window.mean(targets, name), *quantiles)


def _worker(group: Group, seen: Seen, window: Window) -> WorkerView:
    target, role = group.target, group.about("role")
    page = seen.moment.pages.get(target)
    view = WorkerView(
        instance=group.about("instance"),
        role=role,
        target=target,
        state="silent",
        why=seen.silent.get(target, ""),
        pid=_number(group.about("pid")),
        engine_pid=_number(group.about("engine_pid")),
    )
    if page is None:
        return view
    computed = "prefill_computed" if role == "prefill" else "generation"
    hits, asked = "baton_prefix_cache_hits_tokens_total", "baton_prefix_cache_queries_tokens_total"
    return msgspec.structs.replace(
        view,
        state=_state(page),
        running=int(gauge(page, "baton_requests_running")),
        waiting=int(gauge(page, "baton_requests_waiting")),
        queued_prefill_tokens=int(gauge(page, "baton_queued_prefill_tokens")),
        kv_usage=gauge(page, "baton_kv_cache_usage_ratio"),
        kv_tokens=int(gauge(page, "baton_kv_cache_tokens")),
        hit_ratio=window.ratio([target], hits, asked),
        tokens_per_s=window.rate([target], f"baton_{computed}_tokens_total"),
        received_bytes_per_s=window.rate([target], "baton_kv_transfer_bytes_total"),
        step_s=window.mean([target], "baton_engine_step_seconds"),
        memory_bytes=int(
            gauge(page, "process_resident_memory_bytes")
            + gauge(page, "baton_engine_process_resident_memory_bytes")
        ),
        engine_restarts=int(gauge(page, "baton_engine_restarts_total")),
        speculation=speculation(target, page, window),
    )


def _state(page: Page) -> WorkerState:
    if gauge(page, "baton_draining"):
        return "draining"
    return "ready" if gauge(page, "baton_engine_up") else "down"


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
