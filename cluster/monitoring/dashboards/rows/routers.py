"""Are the routers well?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import highest, rate
from cluster.monitoring.dashboards.rows.parts import ROUTERS as OF_ROUTERS
from cluster.monitoring.dashboards.rows.parts import spread
from cluster.monitoring.dashboards.spec import Panel, Query, Row

_EACH = "router {{replica}}"

ROUTERS = Row(
    "Are the routers well?",
    (
        Panel(
            "To choose workers",
            "Time of one decision. Above some milliseconds the router is short of CPU.",
            spread(m.DECISION),
            colours=look.QUANTILES,
        ),
        Panel(
            "TTFT, observed to predicted",
            "At 100% predictions are right. Far above, placements and refusals rest on wrong"
            " figures: workers are slower than they were when they were measured.",
            spread(m.PREDICTION),
            colours=look.QUANTILES,
        ),
        Panel(
            "Age of the prefix index",
            "Above some seconds: Redis does not answer, or the router does not keep up. It costs"
            " hits, and no request.",
            (Query(highest(m.INDEX_AGE, "replica"), _EACH),),
            colours=look.ROLES,
        ),
        Panel(
            "Blocks in the prefix index",
            "All routers should know about as many.",
            (Query(highest(m.INDEX_ENTRIES, "replica"), _EACH),),
            colours=look.ROLES,
        ),
        Panel(
            "CPU of routers",
            "A router is one process: near 100% of a core it is full, and another one helps.",
            (Query(rate(m.CPU, "replica", match=OF_ROUTERS), _EACH),),
            colours=look.ROLES,
            limits=((0.8, look.BAD),),
        ),
        Panel(
            "Memory of routers",
            "Most of it is the prefix index, and the tokenizer.",
            (Query(highest(m.MEMORY, "replica", match=OF_ROUTERS), _EACH),),
            colours=look.ROLES,
        ),
    ),
)
