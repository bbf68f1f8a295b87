"""Are the engines well?"""

from __future__ import annotations

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import Expr, grown, mean, quantile, rate
from cluster.monitoring.dashboards.rows.parts import EACH_WORKER
from cluster.monitoring.dashboards.spec import Panel, Query, Row

_ACCEPTANCE = rate(m.ACCEPTED, "replica").over(rate(m.DRAFTED, "replica"))
_EXTRA = rate(m.ACCEPTED, "replica").over(rate(m.ROWS, "replica"))
_PER_ROW = Expr(f"1 + {_EXTRA.text}", "short", _EXTRA.uses)

ENGINES = Row(
    "Are the engines well?",
    (
        Panel(
            "Time of a step",
            "On decode workers about the time per output token. p99 far above p50: prompts"
            " between decodes.",
            tuple(
                Query(quantile(q, m.STEP, "role"), f"{{{{role}}}} p{100 * q:.0f}")
                for q in (0.5, 0.99)
            ),
            colours=look.ROLES,
        ),
        Panel(
            "Sequences in a step",
            "Means. Decoding is bound by memory bandwidth: more sequences in a step are nearly"
            " free, until compute or KV pages run out.",
            (Query(mean(m.BATCH, "role"), "{{role}}"),),
            colours=look.ROLES,
        ),
        Panel(
            "Engines replaced",
            "An engine that died or hung is replaced by its worker's front, and its requests go on"
            " elsewhere. Again and again on one worker: its log says why.",
            (Query(grown(m.RESTARTS, "role", "replica"), EACH_WORKER),),
            "bars",
            colours=look.ROLES,
            decimals=0,
        ),
        Panel(
            "Speculation: drafts accepted",
            "Share of the drafted tokens that were verified. Drafts get fewer by themselves where"
            " it is low.",
            (Query(_ACCEPTANCE, "decode {{replica}}"),),
            colours=look.ROLES,
            high=1.0,
        ),
        Panel(
            "Speculation: tokens per step",
            "That a sequence gets of a step: 1 without speculation.",
            (Query(_PER_ROW, "decode {{replica}}"),),
            colours=look.ROLES,
            low=1.0,
            decimals=2,
        ),
        Panel(
            "Speculation: drafts",
            "Tokens proposed per second, and those accepted.",
            (Query(rate(m.DRAFTED), "proposed"), Query(rate(m.ACCEPTED), "accepted")),
            colours=(("proposed", "light-orange"), ("accepted", look.DECODE)),
        ),
    ),
)
