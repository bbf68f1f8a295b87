"""What does the autoscaler want, and what is there?

Where several autoscalers run, one acts; what they tell is taken once.
"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import Expr, grown, highest, rate, total
from cluster.monitoring.dashboards.rows.parts import number
from cluster.monitoring.dashboards.spec import Panel, Query, Row

_LAST = highest(m.REASON, "reason")
_HELD = rate(m.WORKER_SECONDS, "role").within("short")

WELL = Row(
    "Does the autoscaler know what it does?",
    (
        number(
            "Age of what it knows",
            "Of the metrics that the last decision was made of. It changes nothing when they are"
            " three of its intervals old.",
            highest(m.READING_AGE),
            limits=look.OLD,
            idle="none runs",
            decimals=1,
        ),
        number(
            "Workers wanted",
            "Within the limits and the budget.",
            highest(m.DESIRED, "role"),
            "{{role}}",
            calm="blue",
        ),
        number(
            "Workers there",
            "By the role that they serve now, lent ones as well.",
            highest(m.THERE, "role"),
            "{{role}}",
            calm=look.BAD,
            limits=look.AT_LEAST_ONE,
        ),
        number(
            "Out of reach",
            "Objectives that no number of workers meets: a single request on an idle worker misses"
            " them. docs/operations.md says what helps.",
            total(m.INFEASIBLE),
            limits=look.ANY,
        ),
        number(
            "Last reason",
            "Of the last decision, the strongest that applied.",
            Expr(f"{_LAST.text} == 1", _LAST.unit, _LAST.uses),
            "{{reason}}",
            calm="blue",
        ),
        number(
            "Failures, last hour",
            "Parts of turns that failed: a loan, a number that could not be set, the log. The next"
            " turn decides anew.",
            grown(m.TURNS_FAILED, window="1h"),
            limits=((0.5, look.FAIR),),
            decimals=0,
        ),
    ),
)


def _sizes(role: str, about: str) -> Panel:
    return Panel(
        f"{role.capitalize()}: wanted and there",
        f"{about} needed over wanted: a limit or the budget holds.",
        tuple(
            Query(highest(metric, match=f'role="{role}"'), legend)
            for metric, legend in (
                (m.DESIRED, "wanted"),
                (m.THERE, "there"),
                (m.STARTING, "starting"),
                (m.NEEDED, "needed, before limits"),
            )
        ),
        width=12,
        colours=look.REPLICAS,
        decimals=0,
    )


SIZES = Row(
    "How many workers?",
    (
        _sizes("prefill", "There below wanted: it starts, or is lent."),
        _sizes("decode", "There above wanted: it waits before it takes away, and drains."),
        Panel(
            "Workers held",
            "From the asking for them until they are gone, by the role that they serve: what the"
            " cluster costs.",
            (Query(_HELD, "{{role}}"),),
            "stack",
            colours=look.ROLES,
        ),
        Panel(
            "Loans",
            "Workers that took the other role. Many both ways: the mix swings more quickly than"
            " the window of the autoscaler.",
            (Query(grown(m.FLIPS, "from", "to"), "{{from}} to {{to}}"),),
            "bars",
            colours=look.ROLES,
            decimals=0,
        ),
        Panel(
            "Load",
            "Busy prefill workers (erlangs), and sequences that decode at a time, that the window's"
            " requests come to.",
            (Query(highest(m.POOL_LOAD, "role"), "{{role}}"),),
            colours=look.ROLES,
        ),
    ),
)
