"""The dashboards, and every query in them.

catalog (metrics) --promql--> expressions --rows--> panels --generate--> deploy/grafana/*.json
"""

from __future__ import annotations

from cluster.monitoring.dashboards.notes import NOTES
from cluster.monitoring.dashboards.rows.engines import ENGINES
from cluster.monitoring.dashboards.rows.fine import FINE
from cluster.monitoring.dashboards.rows.handover import HANDOVER
from cluster.monitoring.dashboards.rows.load import LOAD
from cluster.monitoring.dashboards.rows.memory import MEMORY
from cluster.monitoring.dashboards.rows.planner import SIZES, WELL
from cluster.monitoring.dashboards.rows.pools import POOLS as SHORT
from cluster.monitoring.dashboards.rows.processes import PROCESSES
from cluster.monitoring.dashboards.rows.reasons import DEMAND, REASONS, TRUTH
from cluster.monitoring.dashboards.rows.requests import REQUESTS
from cluster.monitoring.dashboards.rows.routers import ROUTERS
from cluster.monitoring.dashboards.rows.times import TIMES
from cluster.monitoring.dashboards.rows.walls import WALLS
from cluster.monitoring.dashboards.spec import Dashboard

SERVICE = Dashboard(
    "baton-service",
    "Baton: service",
    "What clients get: is it fine, how long do they wait, what becomes of their requests.",
    (FINE, TIMES, REQUESTS, ROUTERS),
    NOTES,
)
POOLS = Dashboard(
    "baton-pools",
    "Baton: pools",
    "What prefill and decode workers do, and what they are short of.",
    (SHORT, WALLS, LOAD, MEMORY, HANDOVER, ENGINES, PROCESSES),
    NOTES,
)
PLANNER = Dashboard(
    "baton-planner",
    "Baton: planner",
    "What the autoscaler wants, what there is, and whether it is right.",
    (WELL, SIZES, TRUTH, DEMAND, REASONS),
    NOTES,
)
DASHBOARDS = (SERVICE, POOLS, PLANNER)


def queries() -> list[tuple[str, str, str]]:
    """(dashboard, panel, expression) of every query of every panel, with the variables
    ``$cluster``, ``$model`` and ``$__rate_interval`` in it."""
    return [
        (board.uid, panel.title, query.expr.text)
        for board in DASHBOARDS
        for panel in board.panels()
        for query in panel.queries
    ]


def note_queries() -> list[tuple[str, str, str]]:
    """(dashboard, annotation, expression): empty while nothing of the kind happens."""
    return [(b.uid, note.name, note.expr.text) for b in DASHBOARDS for note in b.notes]
