"""Describes dashboards independently of Grafana: rows of panels, and the queries of each panel.

Grafana's grid is 24 units wide; a unit of height is 30 pixels plus a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels.palette import ROLES, Colours, Limits
from cluster.dashboards.panels.promql import Expr, max_of, quantile

PanelKind: TypeAlias = Literal["lines", "stack", "bars", "stat", "heatmap", "states"]

WIDTH = 24
ROUTERS = 'role="router"'
WORKERS = 'role=~"prefill|decode"'
EACH_WORKER = "{{role}} {{replica}}"
QUANTILES = (0.5, 0.9, 0.99)


class PanelQuery(NamedTuple):
    """One query of a panel. ``legend`` may contain a label's value as ``{{label}}``."""

    expr: Expr
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. ``about`` says what it shows, and what to do about it.

    ``calm`` is the colour below the first of ``limits``, ``idle`` the text without data, and
    ``states`` the meaning of the values of kind "states"."""

    title: str
    about: str
    queries: tuple[PanelQuery, ...]
    kind: PanelKind = "lines"
    width: int = 8
    height: int = 7
    colours: Colours = ROLES
    calm: str = "green"
    limits: Limits = ()
    low: float | None = 0.0
    high: float | None = None
    decimals: int | None = None
    idle: str = "-"
    states: Colours = ()

    @property
    def unit(self) -> str:
        """The unit of all queries of the panel."""
        units = {query.expr.unit for query in self.queries}
        assert len(units) == 1, f"{self.title}: {units}"
        return units.pop()


@dataclass(frozen=True)
class DashboardRow:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class DashboardAnnotation:
    """A kind of event that is drawn across all panels of a dashboard."""

    name: str
    expr: Expr
    text: str
    colour: str


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    about: str
    rows: tuple[DashboardRow, ...]
    annotations: tuple[DashboardAnnotation, ...] = ()

    def panels(self) -> Iterator[Panel]:
        for each in self.rows:
            yield from each.panels


def row(title: str, *panels: Panel) -> DashboardRow:
    return DashboardRow(title, panels)


def graph(
    title: str, about: str, *queries: tuple[Expr, str], kind: PanelKind = "lines", **fields: Any
) -> Panel:
    """Return a panel of (expression, legend) pairs; ``fields`` are those of ``Panel``."""
    return Panel(title, about, tuple(PanelQuery(*query) for query in queries), kind, **fields)


stack = partial(graph, kind="stack")
bars = partial(graph, kind="bars")
heatmap = partial(graph, kind="heatmap")
states = partial(graph, kind="states")


def stat(title: str, about: str, expr: Expr, legend: str = "", **fields: Any) -> Panel:
    """Return a panel with the last value of one series, or of a few."""
    shape: dict[str, Any] = {"width": 4, "height": 4} | fields
    return graph(title, about, (expr, legend or title), kind="stat", **shape)


def quantile_queries(metric: m.Metric, slo: str = "") -> tuple[PanelQuery, ...]:
    """Return queries for p50, p90 and p99 of a histogram, and for its objective if it has one."""
    found = [PanelQuery(quantile(q, metric), f"p{100 * q:.0f}") for q in QUANTILES]
    if slo:
        found.append(PanelQuery(max_of(m.OBJECTIVE, match=f'slo="{slo}"'), "objective"))
    return tuple(found)


class GridPosition(NamedTuple):
    """Position of a panel on the grid, counted from the left and from the top."""

    x: int
    y: int
    width: int
    height: int


def grid_positions(of: DashboardRow, top: int) -> list[GridPosition]:
    """Return the positions of a row's panels; the row's own line is at ``top``.

    Panels are placed from left to right; a new line begins below the highest panel."""
    found: list[GridPosition] = []
    x, y, line = 0, top + 1, 0
    for panel in of.panels:
        assert panel.width <= WIDTH, panel.title
        if x + panel.width > WIDTH:
            x, y, line = 0, y + line, 0
        found.append(GridPosition(x, y, panel.width, panel.height))
        x, line = x + panel.width, max(line, panel.height)
    return found


def row_bottom(of: DashboardRow, top: int) -> int:
    """Return the grid line at which the next row begins."""
    return max(position.y + position.height for position in grid_positions(of, top))
