"""What a dashboard is, before anything is said of Grafana: rows of panels, panels of queries.

Grafana's grid is 24 wide; a unit of height is 30 pixels, and a bit between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels.promql import Expr, highest, quantile

Kind: TypeAlias = Literal["lines", "stack", "bars", "stat", "heatmap", "states"]
Colours: TypeAlias = tuple[tuple[str, str], ...]
"""(legend, colour). A regular expression, which has a dot in it, gives shades of the colour. The
last that fits counts."""

WIDTH = 24


@dataclass(frozen=True)
class Query:
    """``legend``: with ``{{label}}`` for a label's value."""

    expr: Expr
    legend: str


@dataclass(frozen=True)
class Panel:
    """``about``: what to see in it, and what to do. ``limits``: (from here on, colour), ascending;
    before the first one ``calm`` counts. ``states``: what the values of a kind "states" mean."""

    title: str
    about: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    width: int = 8
    height: int = 7
    colours: Colours = ()
    calm: str = "green"
    limits: tuple[tuple[float, str], ...] = ()
    low: float | None = 0.0
    high: float | None = None
    decimals: int | None = None
    idle: str = "-"
    states: tuple[tuple[str, str], ...] = ()

    @property
    def unit(self) -> str:
        """That of its queries; they have one."""
        units = {query.expr.unit for query in self.queries}
        assert len(units) == 1, f"{self.title}: {units}"
        return units.pop()


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Note:
    """Something that happened, drawn across all panels."""

    name: str
    expr: Expr
    text: str
    colour: str


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    notes: tuple[Note, ...] = field(default=())

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


class Place(NamedTuple):
    """On the grid, from the left and from the top."""

    x: int
    y: int
    width: int
    height: int


def places(row: Row, top: int) -> list[Place]:
    """Of a row's panels, the row's own line being at ``top``: from left to right, then below the
    highest of the line."""
    found: list[Place] = []
    x, y, line = 0, top + 1, 0
    for panel in row.panels:
        assert panel.width <= WIDTH, panel.title
        if x + panel.width > WIDTH:
            x, y, line = 0, y + line, 0
        found.append(Place(x, y, panel.width, panel.height))
        x, line = x + panel.width, max(line, panel.height)
    return found


def below(row: Row, top: int) -> int:
    """Where the next row begins."""
    return max(place.y + place.height for place in places(row, top))


# MERGED cluster.monitoring.dashboards.rows.parts
# Queries and panels that several rows have.

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
