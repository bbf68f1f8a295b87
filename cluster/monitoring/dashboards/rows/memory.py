"""Is there memory enough, and does it spare work?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import highest, rate
from cluster.monitoring.dashboards.rows.parts import EACH_WORKER, WORKERS
from cluster.monitoring.dashboards.spec import Panel, Query, Row

_HITS = rate(m.HITS, "role", match=WORKERS).over(rate(m.QUERIES, "role", match=WORKERS))

MEMORY = Row(
    "Is there memory enough, and does it spare work?",
    (
        Panel(
            "KV pages in use",
            "By sequences that run; cached blocks that nobody uses are free. Near 100% sequences"
            " wait, or lose their pages.",
            (Query(highest(m.KV_USAGE, "role", "replica"), EACH_WORKER),),
            colours=look.ROLES,
            limits=((0.9, look.BAD),),
            high=1.0,
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their pages, and are computed again. More than now and then: the"
            " decode pool wants more KV memory, or another worker.",
            (Query(rate(m.PREEMPTIONS, "role"), "{{role}}"),),
            colours=look.ROLES,
        ),
        Panel(
            "Prefix cache hits",
            "Share of the tokens looked for that were found. It falls when prompts share less,"
            " when caches are too small, and after workers were replaced.",
            (Query(_HITS, "{{role}}"),),
            colours=look.ROLES,
            high=1.0,
        ),
    ),
)
