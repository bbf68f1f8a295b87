"""What do the workers' processes use?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import highest, rate
from cluster.monitoring.dashboards.rows.parts import EACH_WORKER, WORKERS
from cluster.monitoring.dashboards.spec import Panel, Query, Row

PROCESSES = Row(
    "What do the workers' processes use?",
    (
        Panel(
            "CPU of engines",
            "In cores. On a GPU: one core, while it works.",
            (Query(rate(m.ENGINE_CPU, "role", "replica"), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "CPU of fronts",
            "In cores. A front is one process: near 100% it is full.",
            (Query(rate(m.CPU, "role", "replica", match=WORKERS), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "Memory",
            "Front and engine; of an engine on a CPU the weights and the KV pool are most of it.",
            (
                Query(highest(m.ENGINE_MEMORY, "role", "replica"), f"{EACH_WORKER} engine"),
                Query(highest(m.MEMORY, "role", "replica", match=WORKERS), f"{EACH_WORKER} front"),
            ),
            colours=look.ROLES,
        ),
    ),
)
