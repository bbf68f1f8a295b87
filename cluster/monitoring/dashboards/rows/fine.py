"""Is it fine? Shares and rates are of the last five minutes, and all numbers are of now: what is
gone leaves no old number behind."""

from __future__ import annotations

from functools import partial

from cluster.monitoring.dashboards import catalog as m
from cluster.monitoring.dashboards import look
from cluster.monitoring.dashboards.promql import RECENT, Expr, highest, quantile, rate
from cluster.monitoring.dashboards.rows.parts import number
from cluster.monitoring.dashboards.spec import Row

_ALERTS = 'ALERTS{alertstate="firing", alertname=~"Baton.*"}'
_NONE = 'label_replace(vector(0), "alertname", "none", "", "")'
_FIRING = Expr(f"sum by (alertname) ({_ALERTS})\nor on ()\n{_NONE}", "short", ())
_MET, _OF = (rate(metric, match='slo="all"', window=RECENT) for metric in (m.SLO_MET, m.SLO_OF))
_FAILED = rate(m.REQUESTS, match='status=~"5.."', window=RECENT).or_zero()

_number = partial(number, width=3)


def _of_objective(metric: m.Metric, slo: str) -> Expr:
    p99 = quantile(0.99, metric, window=RECENT)
    return Expr(f"({p99.text})", p99.unit, p99.uses).over(
        highest(m.OBJECTIVE, match=f'slo="{slo}"')
    )


FINE = Row(
    "Is it fine?",
    (
        _number(
            "In time",
            "Requests of the last five minutes that ended well and met both objectives. Below 99%,"
            " the next row shows which of the two times is over its line, or they failed. Waiting"
            " in vain for a first token counts, refusals do not.",
            _MET.over(_OF),
            calm=look.BAD,
            limits=look.IN_TIME,
            low=None,
            idle="idle",
            decimals=1,
        ),
        _number(
            "Goodput",
            "Requests per second that ended well and met both objectives.",
            _MET,
            calm="blue",
        ),
        _number(
            "TTFT p99 of SLO",
            "The 99th percentile of the time to first token, as a share of its objective.",
            _of_objective(m.TTFT, "ttft"),
            limits=look.OF_OBJECTIVE,
            idle="idle",
        ),
        _number(
            "TPOT p99 of SLO",
            "The 99th percentile of the time per output token, as a share of its objective.",
            _of_objective(m.TPOT, "tpot"),
            limits=look.OF_OBJECTIVE,
            idle="idle",
        ),
        _number(
            "Failed",
            "Requests that ended with an error of the service's own (5xx), of all.",
            _FAILED.over(rate(m.REQUESTS, window=RECENT)),
            limits=((1e-9, look.FAIR), (0.01, look.BAD)),
            idle="idle",
            decimals=1,
        ),
        _number(
            "Refused",
            "Requests per second that were not let in (429): there is more to do than the workers"
            " can. The dashboard of the pools shows which kind is short.",
            rate(m.REFUSALS, window=RECENT),
            limits=look.ANY,
        ),
        _number(
            "Workers ready",
            "As the routers know them. Without a decode worker nothing is served; without a"
            " prefill worker decode workers compute prompts themselves, more slowly.",
            highest(m.REPLICAS, "role", match='state="ready"'),
            "{{role}}",
            calm=look.BAD,
            limits=look.AT_LEAST_ONE,
            idle="unknown",
        ),
        _number(
            "Alerts",
            "Those that fire. docs/operations.md says of each what to do.",
            _FIRING,
            "{{alertname}}",
            limits=((1.0, look.BAD),),
        ),
    ),
)
