"""The walls of the pools, as a router's metrics. ``role`` is the pool's."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge

from protocol.walls import WALLS
from router.walls.pools import PoolWall

NONE = "none"


class WallGauges:
    def __init__(self, registry: CollectorRegistry, model: str, replica: str) -> None:
        self._model, self._replica = model, replica

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            names = ["model", "role", *labels, "replica"]
            return Gauge(f"baton_{name}", text, names, registry=registry)

        self._binding = gauge(
            "binding_wall", "1: this wall binds the pool; none: none does", "wall"
        )
        self._used = gauge(
            "pool_wall_utilization_ratio", "Of the wall's ceiling, the pool's workers", "wall"
        )
        self._busy = gauge("pool_busy_ratio", "Of the last seconds: steps ran, on average")
        self._gains = gauge(
            "wall_gain_ratio",
            "Tokens per second that a technique would bring the pool, over those now",
            *("wall", "technique"),
        )

    def show(self, pools: Iterable[PoolWall]) -> None:
        """As they are now."""
        for gauge in (self._binding, self._used, self._busy, self._gains):
            gauge.clear()
        for pool in pools:
            self._show(pool)

    def _show(self, pool: PoolWall) -> None:
        bound = pool.binding.wall or NONE
        of = self._model, pool.role
        for wall in (*WALLS, NONE):
            self._binding.labels(*of, wall, self._replica).set(wall == bound)
        if pool.figures is None:
            return
        for wall in WALLS:
            self._used.labels(*of, wall, self._replica).set(pool.figures.of(wall))
        self._busy.labels(*of, self._replica).set(pool.figures.busy)
        for technique in pool.techniques:
            self._gains.labels(*of, bound, technique.name, self._replica).set(technique.gain)
