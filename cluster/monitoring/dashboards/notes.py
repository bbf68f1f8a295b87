"""What happened, as lines across the panels of all dashboards."""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import Expr, grown, series
from cluster.monitoring.dashboards.spec import Note

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
