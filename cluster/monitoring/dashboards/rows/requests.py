"""What is asked, and what becomes of it?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import grown, rate, total
from cluster.monitoring.dashboards.rows.parts import ROUTERS
from cluster.monitoring.dashboards.spec import Panel, Query, Row

REQUESTS = Row(
    "What is asked, and what becomes of it?",
    (
        Panel(
            "Requests, by how they end",
            "ok, cancelled by the client, or the HTTP status of the error.",
            (Query(rate(m.REQUESTS, "status"), "{{status}}"),),
            "stack",
            colours=look.STATUSES,
        ),
        Panel(
            "Refusals, by reason",
            "requests: too many of one priority at once; ttft: the first token was predicted to"
            " come after the deadline; queue: the queue was predicted to take too long.",
            (Query(rate(m.REFUSALS, "reason"), "{{reason}}"),),
            "stack",
        ),
        Panel(
            "Requests inside",
            "If those before their first token grow, and do not fall again, there is more to do"
            " than the workers can.",
            (
                Query(total(m.ASKED, match=ROUTERS), "before their first token"),
                Query(total(m.ANSWERED, match=ROUTERS), "getting tokens"),
            ),
            "stack",
            colours=(("before their first token", look.FAIR), ("getting tokens", look.GOOD)),
        ),
        Panel(
            "Tokens to clients",
            "By all routers together.",
            (Query(rate(m.OUTPUT), "output"),),
            colours=look.MIX,
        ),
        Panel(
            "Prompts",
            "Of requests that were answered: all of their prompts' tokens, and those that had to"
            " be computed.",
            (Query(rate(m.PROMPT), "all"), Query(rate(m.UNCACHED), "computed")),
            colours=(("all", "light-blue"), *look.MIX),
        ),
        Panel(
            "Requests of the hour before",
            "What a rate is too small to show: single errors.",
            (Query(grown(m.REQUESTS, "status", window="1h"), "{{status}}"),),
            colours=look.STATUSES,
            decimals=0,
        ),
    ),
)
