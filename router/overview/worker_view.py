"""One worker, as an overview shows it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from router.overview.metrics_pages import Group, Seen
from router.overview.prometheus_text import Page, gauge, whole
from router.overview.rates import Window

# MERGED router.overview.speculation
# What is shown of a decode worker's speculation.

SpeculationState: TypeAlias = Literal["active", "dropped"]


class SpeculationView(msgspec.Struct, frozen=True, kw_only=True):
    """``acceptance``: of the tokens that were drafted; ``tokens_per_step``: of a sequence, steps
    without drafts included; speed-ups: of the steps with drafts."""

    state: SpeculationState
    proposer: str = ""  # empty where it was dropped; the worker's log says why
    acceptance: float | None = None
    tokens_per_draft: float | None = None  # that were proposed
    tokens_per_step: float | None = None
    predicted_speedup: float | None = None
    measured_speedup: float | None = None


def speculation(target: str, page: Page, window: Window) -> SpeculationView | None:
    """None where it is off."""
    proposers = [s.labels.get("proposer", "") for s in page.get("baton_spec_decode_active", ())]
    if not proposers and not gauge(page, "baton_spec_decode_drops_total"):
        return None
    at = [target]
    of_rows = window.ratio(at, "baton_spec_decode_num_accepted_tokens_total", _ROWS)
    active = bool(proposers)
    return SpeculationView(
        state="active" if active else "dropped",
        proposer=proposers[0] if active else "",
        acceptance=window.ratio(at, "baton_spec_decode_num_accepted_tokens_total", _DRAFTED),
        tokens_per_draft=window.ratio(at, _DRAFTED, "baton_spec_decode_num_drafts_total"),
        tokens_per_step=None if of_rows is None else 1.0 + of_rows,
        predicted_speedup=gauge(page, "baton_spec_decode_predicted_speedup") if active else None,
        measured_speedup=gauge(page, "baton_spec_decode_measured_speedup") if active else None,
    )


_ROWS = "baton_decode_rows_total"
_DRAFTED = "baton_spec_decode_num_draft_tokens_total"


WorkerState: TypeAlias = Literal["ready", "draining", "down", "silent"]


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. ``silent``: in the directory, but its page cannot be had (``why``)."""

    instance: str
    role: str
    home: str = ""  # role that it was started for
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

    @property
    def lent(self) -> bool:
        """Whether it works for the other pool than its own."""
        return bool(self.home) and self.home != self.role


def worker_view(group: Group, seen: Seen, window: Window) -> WorkerView:
    target, role = group.target, group.about("role")
    page = seen.moment.pages.get(target)
    view = WorkerView(
        instance=group.about("instance"),
        role=role,
        home=group.about("home"),
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
        running=whole(gauge(page, "baton_requests_running")),
        waiting=whole(gauge(page, "baton_requests_waiting")),
        queued_prefill_tokens=whole(gauge(page, "baton_queued_prefill_tokens")),
        kv_usage=gauge(page, "baton_kv_cache_usage_ratio"),
        kv_tokens=whole(gauge(page, "baton_kv_cache_tokens")),
        hit_ratio=window.ratio([target], hits, asked),
        tokens_per_s=window.rate([target], f"baton_{computed}_tokens_total"),
        received_bytes_per_s=window.rate([target], "baton_kv_transfer_bytes_total"),
        step_s=window.mean([target], "baton_engine_step_seconds"),
        memory_bytes=whole(
            gauge(page, "process_resident_memory_bytes")
            + gauge(page, "baton_engine_process_resident_memory_bytes")
        ),
        engine_restarts=whole(gauge(page, "baton_engine_restarts_total")),
        speculation=speculation(target, page, window),
    )


def _state(page: Page) -> WorkerState:
    if gauge(page, "baton_draining"):
        return "draining"
    return "ready" if gauge(page, "baton_engine_up") else "down"


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
