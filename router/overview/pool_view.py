"""Which wall binds each pool, as an overview shows it: what the first router that answers says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocol.registry.worker_utilisation import WALLS
from router.overview.metrics_pages import Group, Seen
from router.overview.prometheus_text import Page, gauge, matching, whole
from router.walls.binding import IDLE, NONE, ROLES
from router.walls.techniques import TRAPS


class TechniqueView(msgspec.Struct, frozen=True):
    """``gain``: in tokens per second, as a factor; ``trap``: what it may cost."""

    name: str
    gain: float
    trap: str


class WallView(msgspec.Struct, frozen=True, kw_only=True):
    """One pool. ``wall`` None: none binds. ``text``: all of it in words."""

    role: str
    wall: str | None
    busy: float  # share of the time in which steps ran
    utilization: dict[str, float]  # of each wall's ceiling
    techniques: list[TechniqueView]  # that would relax it, the best first
    text: str


def wall_views(pages: Sequence[Page]) -> list[WallView]:
    """``pages``: of routers. Pools of which nothing is known yet are not there."""
    for page in pages:
        found = [view for role in ROLES if (view := _view(page, role)) is not None]
        if found:
            return found
    return []


def _view(page: Page, role: str) -> WallView | None:
    of = list(matching(page, "baton_pool_wall_utilization_ratio", {"role": role}))
    used = {s.labels.get("wall", ""): s.value for s in of}
    if not used.keys() >= set(WALLS):
        return None
    bound = (s for s in matching(page, "baton_binding_wall", {"role": role}) if s.value)
    wall = next((s.labels.get("wall", "") for s in bound), NONE)
    busy = gauge(page, "baton_pool_busy_ratio", role=role)
    gains = [
        TechniqueView(name, s.value, TRAPS.get(name, ""))
        for s in matching(page, "baton_wall_gain_ratio", {"role": role})
        if (name := s.labels.get("technique", ""))
    ]
    gains.sort(key=lambda technique: -technique.gain)
    known = wall if wall in WALLS else None
    return WallView(
        role=role,
        wall=known,
        busy=busy,
        utilization=used,
        techniques=gains,
        text=_text(known, busy, used, gains),
    )


def _text(
    wall: str | None, busy: float, used: dict[str, float], gains: Sequence[TechniqueView]
) -> str:
    if wall is not None:
        bound = f"{wall} {used[wall]:.0%}"
        if not gains:
            return bound
        best = gains[0]
        return f"{bound}; {best.name} would give {best.gain:.1f}x (trap: {best.trap})"
    if busy < IDLE:
        return f"none binds, steps run {busy:.0%} of the time"
    both = f"compute {used['compute']:.0%}, bandwidth {used['bandwidth']:.0%}"
    return f"none binds, steps are mostly overhead ({both})"


# MERGED router.overview.autoscaler_view
# The autoscaler, as an overview shows it: the one that acts, where there are several.


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
    found = [
        _view_autoscaler_view(group, seen)
        for group in groups
        if group.about("role") == "autoscaler"
    ]
    return min(found, key=lambda view: _order(view.mode), default=None)


def _order(mode: str) -> int:
    return _FIRST.index(mode) if mode in _FIRST else len(_FIRST)


def _view_autoscaler_view(group: Group, seen: Seen) -> AutoscalerView:
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
    text = _text_autoscaler_view(mode, reason, pools, infeasible)
    return AutoscalerView(mode=mode, reason=reason, pools=pools, infeasible=infeasible, text=text)


def _one(page: Page, name: str, label: str) -> str:
    """The label of the series that is 1."""
    return next((s.labels.get(label, "") for s in matching(page, name, {}) if s.value), "")


def _pool(page: Page, role: str) -> PoolView:
    names = ("desired", "actual", "starting")
    return PoolView(*(whole(gauge(page, f"baton_{name}_replicas", role=role)) for name in names))


def _text_autoscaler_view(
    mode: str, reason: str, pools: dict[str, PoolView], infeasible: list[str]
) -> str:
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
