"""The pools in an overview: their walls, and what the autoscaler wants for them.

Walls are those of the first router that answers; of several autoscalers the one that acts is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocol.registry.directory import WALLS
from router.overview.prometheus_text import MetricsPage, matching_samples, sum_samples, to_count
from router.overview.scraper import ScrapeResult, TargetGroup
from router.walls.binding import IDLE, NO_WALL, ROLES
from router.walls.techniques import TRAPS

_MODES = ("act", "advise", "watch", "")  # in the order of preference
_MODE_TEXT = {
    "act": "wants",
    "advise": "advises",
    "watch": "watches another autoscaler, and would want",
}


class TechniqueView(msgspec.Struct, frozen=True):
    """``gain``: in tokens per second, as a factor; ``trap``: what it may cost."""

    name: str
    gain: float
    trap: str


class WallView(msgspec.Struct, frozen=True, kw_only=True):
    """The wall of one pool; ``wall`` is None where none binds, ``text`` says all of it in words."""

    role: str
    wall: str | None
    busy: float  # share of the time in which steps ran
    utilization: dict[str, float]  # of each wall's ceiling
    techniques: list[TechniqueView]  # that would relax it, best first
    text: str


class PoolView(msgspec.Struct, frozen=True):
    """Worker counts of a role: wanted, running, and starting."""

    desired: int
    actual: int
    starting: int


class AutoscalerView(msgspec.Struct, frozen=True, kw_only=True):
    """The autoscaler. ``mode`` is act, advise or watch; it is empty before the first decision and
    where there is no page (``why``). ``text`` says all of it in words."""

    mode: str
    reason: str
    pools: dict[str, PoolView]
    infeasible: list[str]  # objectives that no number of workers meets
    why: str = ""
    text: str


def wall_views(pages: Sequence[MetricsPage]) -> list[WallView]:
    """Return the pools' walls from routers' ``pages``, without pools of which nothing is known."""
    for page in pages:
        found = [view for role in ROLES if (view := _wall_view(page, role)) is not None]
        if found:
            return found
    return []


def _wall_view(page: MetricsPage, role: str) -> WallView | None:
    samples = matching_samples(page, "baton_pool_wall_utilization_ratio", {"role": role})
    used = {s.labels.get("wall", ""): s.value for s in samples}
    if not used.keys() >= set(WALLS):
        return None
    bound = (s for s in matching_samples(page, "baton_binding_wall", {"role": role}) if s.value)
    wall = next((s.labels.get("wall", "") for s in bound), NO_WALL)
    busy = sum_samples(page, "baton_pool_busy_ratio", role=role)
    gains = [
        TechniqueView(name, s.value, TRAPS.get(name, ""))
        for s in matching_samples(page, "baton_wall_gain_ratio", {"role": role})
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
        text=_wall_text(known, busy, used, gains),
    )


def _wall_text(
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


def autoscaler_view(scraped: ScrapeResult) -> AutoscalerView | None:
    """Return the view of the autoscaler; None where there is none."""
    groups = [group for group in scraped.groups if group.label("role") == "autoscaler"]
    views = [_autoscaler_view(group, scraped) for group in groups]
    return min(views, key=lambda view: _mode_order(view.mode), default=None)


def _mode_order(mode: str) -> int:
    return _MODES.index(mode) if mode in _MODES else len(_MODES)


def _autoscaler_view(group: TargetGroup, scraped: ScrapeResult) -> AutoscalerView:
    page = scraped.snapshot.pages.get(group.target)
    if page is None:
        why = scraped.silent.get(group.target, "")
        text = f"{group.target} {why}"
        return AutoscalerView(mode="", reason="", pools={}, infeasible=[], why=why, text=text)
    mode = _active_label(page, "baton_autoscaler_mode", "mode")
    reason = _active_label(page, "baton_scaling_reason", "reason")
    pools = {role: _pool_view(page, role) for role in ROLES} if mode else {}
    missed = matching_samples(page, "baton_slo_infeasible", {})
    infeasible = [sample.labels.get("slo", "") for sample in missed if sample.value]
    text = _autoscaler_text(mode, reason, pools, infeasible)
    return AutoscalerView(mode=mode, reason=reason, pools=pools, infeasible=infeasible, text=text)


def _active_label(page: MetricsPage, name: str, label: str) -> str:
    """Return the label of the series whose value is not 0."""
    return next((s.labels.get(label, "") for s in matching_samples(page, name, {}) if s.value), "")


def _pool_view(page: MetricsPage, role: str) -> PoolView:
    names = ("desired", "actual", "starting")
    return PoolView(
        *(to_count(sum_samples(page, f"baton_{name}_replicas", role=role)) for name in names)
    )


def _autoscaler_text(
    mode: str, reason: str, pools: dict[str, PoolView], infeasible: list[str]
) -> str:
    if not mode:
        return "has not decided anything yet"
    parts = [
        f"{pool.desired} {role}"
        + f" (present {pool.actual}{f', starting {pool.starting}' * bool(pool.starting)})"
        for role, pool in pools.items()
    ]
    missed = "".join(f"; no number of workers meets {slo.upper()}" for slo in infeasible)
    return f"{_MODE_TEXT.get(mode, mode)} {', '.join(parts)}: {reason.replace('_', ' ')}{missed}"
