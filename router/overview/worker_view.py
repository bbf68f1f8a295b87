"""One worker in an overview, with its speculation."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from protocol.endpoints.grpc_endpoints import host_of
from router.overview.link_view import LinkView, link_views
from router.overview.prometheus_text import MetricsPage, sum_samples, to_count
from router.overview.rates import RateWindow
from router.overview.scraper import ScrapeResult, TargetGroup

SpeculationState: TypeAlias = Literal["active", "dropped"]
WorkerState: TypeAlias = Literal["ready", "draining", "down", "silent"]

_ROWS = "baton_decode_rows_total"
_DRAFTED = "baton_spec_decode_num_draft_tokens_total"
_ACCEPTED = "baton_spec_decode_num_accepted_tokens_total"


class SpeculationView(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding of one decode worker. ``acceptance`` is the accepted share of the
    drafted tokens; ``tokens_per_step`` counts one sequence, steps without drafts included; the
    speed-ups are those of steps with drafts."""

    state: SpeculationState
    proposer: str = ""  # empty where speculation was dropped; the worker's log says why
    acceptance: float | None = None
    tokens_per_draft: float | None = None  # proposed
    tokens_per_step: float | None = None
    predicted_speedup: float | None = None
    measured_speedup: float | None = None


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. ``silent``: it is in the directory, but has no page (``why``)."""

    instance: str
    role: str
    home: str = ""  # the role it was started for
    target: str
    host: str = ""  # of its metrics address
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
    links: list[LinkView] = []  # to the workers that KV was received from

    @property
    def lent(self) -> bool:
        """Return whether it is lent to the other pool."""
        return bool(self.home) and self.home != self.role


def worker_view(group: TargetGroup, scraped: ScrapeResult, window: RateWindow) -> WorkerView:
    """Compute the view of one worker."""
    target, role = group.target, group.label("role")
    page = scraped.snapshot.pages.get(target)
    view = WorkerView(
        instance=group.label("instance"),
        role=role,
        home=group.label("home"),
        target=target,
        host=host_of(target),
        state="silent",
        why=scraped.silent.get(target, ""),
        pid=_number(group.label("pid")),
        engine_pid=_number(group.label("engine_pid")),
    )
    if page is None:
        return view
    computed = "prefill_computed" if role == "prefill" else "generation"
    hits, queries = (
        "baton_prefix_cache_hits_tokens_total",
        "baton_prefix_cache_queries_tokens_total",
    )
    return msgspec.structs.replace(
        view,
        state=_state(page),
        running=to_count(sum_samples(page, "baton_requests_running")),
        waiting=to_count(sum_samples(page, "baton_requests_waiting")),
        queued_prefill_tokens=to_count(sum_samples(page, "baton_queued_prefill_tokens")),
        kv_usage=sum_samples(page, "baton_kv_cache_usage_ratio"),
        kv_tokens=to_count(sum_samples(page, "baton_kv_cache_tokens")),
        hit_ratio=window.ratio([target], hits, queries),
        tokens_per_s=window.rate([target], f"baton_{computed}_tokens_total"),
        received_bytes_per_s=window.rate([target], "baton_kv_transfer_bytes_total"),
        step_s=window.mean([target], "baton_engine_step_seconds"),
        memory_bytes=to_count(
            sum_samples(page, "process_resident_memory_bytes")
            + sum_samples(page, "baton_engine_process_resident_memory_bytes")
        ),
        engine_restarts=to_count(sum_samples(page, "baton_engine_restarts_total")),
        speculation=speculation_view(target, page, window),
        links=link_views(page),
    )


def _state(page: MetricsPage) -> WorkerState:
    if sum_samples(page, "baton_draining"):
        return "draining"
    return "ready" if sum_samples(page, "baton_engine_up") else "down"


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def speculation_view(target: str, page: MetricsPage, window: RateWindow) -> SpeculationView | None:
    """Compute the view of a worker's speculation; None where it is off."""
    proposers = [s.labels.get("proposer", "") for s in page.get("baton_spec_decode_active", ())]
    if not proposers and not sum_samples(page, "baton_spec_decode_drops_total"):
        return None
    at = [target]
    predicted = sum_samples(page, "baton_spec_decode_predicted_speedup")
    measured = sum_samples(page, "baton_spec_decode_measured_speedup")
    per_row = window.ratio(at, _ACCEPTED, _ROWS)
    active = bool(proposers)
    return SpeculationView(
        state="active" if active else "dropped",
        proposer=proposers[0] if active else "",
        acceptance=window.ratio(at, _ACCEPTED, _DRAFTED),
        tokens_per_draft=window.ratio(at, _DRAFTED, "baton_spec_decode_num_drafts_total"),
        tokens_per_step=None if per_row is None else 1.0 + per_row,
        predicted_speedup=predicted if active else None,
        measured_speedup=measured if active else None,
    )
