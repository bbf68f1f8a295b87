"""What do the pools have to do, and what do they do?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import Expr, highest, rate, total
from cluster.monitoring.dashboards.rows.parts import EACH_WORKER, WORKERS
from cluster.monitoring.dashboards.spec import Panel, Query, Row

_CACHED = Expr(
    f"{rate(m.PROMPT).text}\n-\n{rate(m.UNCACHED).text}",
    rate(m.PROMPT).unit,
    (m.PROMPT, m.UNCACHED),
)

LOAD = Row(
    "What do the pools have to do, and what do they do?",
    (
        Panel(
            "Mix",
            "What requests are made of: prompt tokens from caches cost nearly nothing, those to"
            " compute load the prefill pool, output tokens the decode pool. When the mix moves,"
            " so should the pools' sizes.",
            (
                Query(_CACHED, "from caches"),
                Query(rate(m.UNCACHED), "computed"),
                Query(rate(m.OUTPUT), "output"),
            ),
            "stack",
            colours=look.MIX,
        ),
        Panel(
            "Queued prompt tokens",
            "Still to be computed, by worker. One high and others low: requests stay where their"
            " prefix is cached; all high: the prefill pool is too small.",
            (Query(total(m.QUEUED, "role", "replica", match=WORKERS), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "Workers by state",
            "As the routers know them.",
            (Query(highest(m.REPLICAS, "role", "state"), "{{role}} {{state}}"),),
            colours=(*look.ROLES, *look.STATES),
            decimals=0,
        ),
        Panel(
            "Prompt tokens computed",
            "Decode workers compute some, too: short prompts, and what no prefill worker can.",
            (Query(rate(m.COMPUTED, "role", "replica"), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "Tokens generated",
            "A prefill worker generates the first token of each request.",
            (Query(rate(m.GENERATED, "role", "replica"), EACH_WORKER),),
            colours=look.ROLES,
        ),
        Panel(
            "Sequences",
            "That decode, and that wait: for prefill, for their KV, or for pages.",
            (
                Query(total(m.RUNNING, "role", match=WORKERS), "{{role}} running"),
                Query(total(m.WAITING, "role", match=WORKERS), "{{role}} waiting"),
            ),
            colours=look.ROLES,
        ),
    ),
)
