"""The autoscaler, as an overview shows it: the one that acts, where there are several."""

from __future__ import annotations

import msgspec

from router.overview.figures import Page, gauge, matching, whole
from router.overview.pages import Group, Seen


class PoolView(msgspec.Struct, frozen=True):
    """Workers of a role: wanted, there, asked for and not there yet."""

    desired: int
    actual: int
    starting: int


class AutoscalerView(msgspec.Struct, frozen=True, kw_only=True):
    """``mode``: act, advise, watch; empty before its first decision, and where its page cannot be
    had (``why``). ``text``: all of it in words."""

    mode: str
    reason: str
    pools: dict[str, PoolView]
    infeasible: list[str]  # objectives that no number of workers meets
    why: str = ""
    text: str


_ROLES = ("prefill", "decode")
_FIRST = ("act", "advise", "watch", "")


def autoscaler_view(groups: list[Group], seen: Seen) -> AutoscalerView | None:
    """None: there is no autoscaler."""
    found = [_view(group, seen) for group in groups if group.about("role") == "autoscaler"]
    return min(found, key=lambda view: _order(view.mode), default=None)


def _order(mode: str) -> int:
    return _FIRST.index(mode) if mode in _FIRST else len(_FIRST)


def _view(group: Group, seen: Seen) -> AutoscalerView:
    page = seen.moment.pages.get(group.target)
    if page is None:
        why = seen.silent.get(group.target, "")
        text = f"{group.target} {why}"
        return AutoscalerView(mode="", reason="", pools={}, infeasible=[], why=why, text=text)
    mode = _one(page, "baton_autoscaler_mode", "mode")
    reason = _one(page, "baton_scaling_reason", "reason")
    pools = {role: _pool(page, role) for role in _ROLES} if mode else {}
    missed = matching(page, "baton_slo_infeasible", {})
    infeasible = [sample.labels.get("slo", "") for sample in missed if sample.value]
    text = _text(mode, reason, pools, infeasible)
    return AutoscalerView(mode=mode, reason=reason, pools=pools, infeasible=infeasible, text=text)


def _one(page: Page, name: str, label: str) -> str:
    """The label of the series that is 1."""
    return next((s.labels.get(label, "") for s in matching(page, name, {}) if s.value), "")


def _pool(page: Page, role: str) -> PoolView:
    names = ("desired", "actual", "starting")
    return PoolView(*(whole(gauge(page, f"baton_{name}_replicas", role=role)) for name in names))


def _text(mode: str, reason: str, pools: dict[str, PoolView], infeasible: list[str]) -> str:
    if not mode:
        return "has not decided anything yet"
    parts = [
        f"{pool.desired} {role}"
        + f" (there {pool.actual}{f', starting {pool.starting}' * bool(pool.starting)})"
        for role, pool in pools.items()
    ]
    missed = "".join(f"; no number of workers meets {slo.upper()}" for slo in infeasible)
    return f"{_DOES.get(mode, mode)} {', '.join(parts)}: {reason.replace('_', ' ')}{missed}"


_DOES = {"act": "wants", "advise": "advises", "watch": "watches; would want"}
