"""The dashboards, and every query in them.

catalog (metrics) --promql--> expressions --rows--> panels --generate--> deploy/grafana/*.json
"""

from __future__ import annotations

from cluster.dashboards.panels import catalog as m
from cluster.dashboards.panels import look
from cluster.dashboards.panels.autoscaler import DEMAND, REASONS, SIZES, TRUTH, WELL
from cluster.dashboards.panels.health import ENGINES, FINE, PROCESSES, ROUTERS
from cluster.dashboards.panels.kv import HANDOVER, MEMORY
from cluster.dashboards.panels.load import LOAD, REQUESTS, TIMES
from cluster.dashboards.panels.load import POOLS as SHORT
from cluster.dashboards.panels.promql import Expr, grown, series
from cluster.dashboards.panels.spec import Dashboard, Note
from cluster.dashboards.panels.walls import WALLS

# MERGED cluster.monitoring.dashboards.notes
# What happened, as lines across the panels of all dashboards.

NOTE_WINDOW = "1m"
"""That Grafana looks at events in steps of."""

_RESTARTED = grown(m.RESTARTS, "role", "replica", window=NOTE_WINDOW)
_LENT = grown(m.FLIPS, "from", "to", window=NOTE_WINDOW)
_READY = series(m.REPLICAS, 'state="ready"')

NOTES = (
    Note(
        "Alerts",
        Expr(
            'max by (alertname, severity) (ALERTS{alertstate="firing", alertname=~"Baton.*"})',
            "short",
            (),
        ),
        "{{alertname}} fires",
        look.BAD,
    ),
    Note(
        "Engine restarts",
        Expr(f"{_RESTARTED.text} > 0", "short", _RESTARTED.uses),
        "an engine of {{role}} {{replica}} was replaced",
        look.DECODE,
    ),
    Note(
        "Workers come and go",
        Expr(f"max by (role) (abs(delta({_READY}[{NOTE_WINDOW}]))) > 0", "short", (m.REPLICAS,)),
        "another number of {{role}} workers is ready",
        look.PREFILL,
    ),
    Note(
        "Loans",
        Expr(f"{_LENT.text} > 0", "short", _LENT.uses),
        "a {{from}} worker serves the other pool, as {{to}}",
        look.ROUTER,
    ),
)


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
