"""Defines the dashboards from the rows in ``panels``.

catalog (metrics) --promql--> expressions --rows--> panels --generate--> made/*.json
"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import palette
from cluster.dashboards.panels.autoscaler import DEMAND, REASONS, SIZES, TRUTH, WELL
from cluster.dashboards.panels.health import ENGINES, FINE, PROCESSES, ROUTERS
from cluster.dashboards.panels.kv import HANDOVER, MEMORY
from cluster.dashboards.panels.load import LOAD, REQUESTS, TIMES
from cluster.dashboards.panels.load import POOLS as SHORT
from cluster.dashboards.panels.promql import Expr, increase, series
from cluster.dashboards.panels.spec import Dashboard, DashboardAnnotation
from cluster.dashboards.panels.walls import WALLS

ANNOTATION_WINDOW = "1m"
"""Step in which Grafana queries events."""

_READY = series(m.REPLICAS, 'state="ready"')

_ANNOTATIONS = (
    DashboardAnnotation(
        "Alerts",
        Expr(
            'max by (alertname, severity) (ALERTS{alertstate="firing", alertname=~"Baton.*"})',
            "short",
            (),
        ),
        "{{alertname}} fires",
        palette.BAD,
    ),
    DashboardAnnotation(
        "Engine restarts",
        increase(m.RESTARTS, "role", "replica", window=ANNOTATION_WINDOW).wrapped(after=" > 0"),
        "an engine of {{role}} {{replica}} was replaced",
        palette.DECODE,
    ),
    DashboardAnnotation(
        "Workers come and go",
        Expr(
            f"max by (role) (abs(delta({_READY}[{ANNOTATION_WINDOW}]))) > 0",
            "short",
            (m.REPLICAS,),
        ),
        "the number of ready {{role}} workers changed",
        palette.PREFILL,
    ),
    DashboardAnnotation(
        "Loans",
        increase(m.FLIPS, "from", "to", window=ANNOTATION_WINDOW).wrapped(after=" > 0"),
        "a {{from}} worker was lent to the other pool, as {{to}}",
        palette.ROUTER,
    ),
)


SERVICE = Dashboard(
    "baton-service",
    "Baton: service",
    "What clients get: whether the service is healthy, how long clients wait, and how their"
    " requests end.",
    (FINE, TIMES, REQUESTS, ROUTERS),
    _ANNOTATIONS,
)
POOLS = Dashboard(
    "baton-pools",
    "Baton: pools",
    "What prefill and decode workers do, and which resource limits them.",
    (SHORT, WALLS, LOAD, MEMORY, HANDOVER, ENGINES, PROCESSES),
    _ANNOTATIONS,
)
PLANNER = Dashboard(
    "baton-planner",
    "Baton: planner",
    "What the autoscaler wants, which workers are present, and whether its predictions are right.",
    (WELL, SIZES, TRUTH, DEMAND, REASONS),
    _ANNOTATIONS,
)
DASHBOARDS = (SERVICE, POOLS, PLANNER)


def panel_queries() -> list[tuple[str, str, str]]:
    """Return (dashboard, panel, expression) of every query of every panel.

    Expressions contain the variables ``$cluster``, ``$model`` and ``$__rate_interval``."""
    return [
        (board.uid, panel.title, query.expr.text)
        for board in DASHBOARDS
        for panel in board.panels()
        for query in panel.queries
    ]


def annotation_queries() -> list[tuple[str, str, str]]:
    """Return (dashboard, annotation, expression) of every annotation."""
    return [(b.uid, each.name, each.expr.text) for b in DASHBOARDS for each in b.annotations]
