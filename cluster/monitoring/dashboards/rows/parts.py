"""Queries and panels that several rows have."""

from __future__ import annotations

from typing import Any

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards.promql import Expr, highest, quantile
from cluster.monitoring.dashboards.spec import Panel, Query

ROUTERS = 'role="router"'
WORKERS = 'role=~"prefill|decode"'
EACH_WORKER = "{{role}} {{replica}}"
QUANTILES = (0.5, 0.9, 0.99)


def spread(metric: m.Metric, slo: str = "") -> tuple[Query, ...]:
    """Quantiles, and the objective where there is one."""
    found = [Query(quantile(q, metric), f"p{100 * q:.0f}") for q in QUANTILES]
    if slo:
        found.append(Query(highest(m.OBJECTIVE, match=f'slo="{slo}"'), "objective"))
    return tuple(found)


def number(title: str, about: str, expr: Expr, legend: str = "", **rest: Any) -> Panel:
    """The last value of one series, or a few; ``rest``: Panel's."""
    shape: dict[str, Any] = {"width": 4, "height": 4} | rest
    return Panel(title, about, (Query(expr, legend or title),), "stat", **shape)
