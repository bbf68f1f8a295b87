"""Which wall binds each pool, as an overview shows it: what the first router that answers says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocol.walls import WALLS
from router.overview.figures import Page, gauge, matching
from router.walls.binding import IDLE
from router.walls.gauges import NONE
from router.walls.pools import ROLES
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
