"""Defines the alerting rules. A ``page`` needs a person now, a ``ticket`` on the next working day.

docs/operations.md has a heading for each alert under "When an alert fires", with its meaning and
remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cluster.monitoring.rules import Windows

RUNBOOK = "docs/operations.md"

Severity: TypeAlias = Literal["page", "ticket"]


@dataclass(frozen=True)
class AlertRule:
    """One rule. It fires for each series of ``expr`` that exists for the time ``lasts``."""

    name: str
    severity: Severity
    expr: str
    summary: str
    description: str
    lasts: str | None = None

    @property
    def runbook(self) -> str:
        return f"{RUNBOOK}#{self.name.lower()}"


_WORKER = 'job="baton", role=~"prefill|decode"'
_PLACE = "{{ $labels.role }} {{ $labels.replica }} at {{ $labels.instance }}"
_DAY_S = 86_400
_SHORT_MINUTES = 10
"""Maximum lifetime of a flapping worker: three in a row fit into half an hour."""


def alert_rules(windows: Windows, target: float = 0.99) -> list[AlertRule]:
    """Return all rules. ``target``: share of requests, in (0, 1), that must meet each objective."""
    assert 0 < target < 1
    budgets = [a for name, slo, what in _OBJECTIVES for a in _burn_alerts(name, slo, what, target)]
    workers = (*_pools(windows), *_flapping(windows), *_missing(windows))
    return [*budgets, *workers, *_autoscaler(windows), *_certificates()]


# ---- objectives ---------------------------------------------------------------------------------

_OBJECTIVES = (
    ("BatonTtftBudgetBurns", "ttft", "had their first token too late"),
    ("BatonTpotBudgetBurns", "tpot", "had their further tokens too slowly"),
    ("BatonFailureBudgetBurns", "success", "were refused for load, or failed"),
)
_BURNS: tuple[tuple[Severity, tuple[tuple[float, str, str], ...]], ...] = (
    ("page", ((14.4, "1h", "5m"), (6, "6h", "30m"))),
    ("ticket", ((1, "3d", "6h"),)),
)
"""Burn rates, with the long and the short window in which both must be exceeded."""

_MIN_REQUESTS = 10
"""Requests in 6 hours below which an error ratio is not significant."""


def _burn_alerts(name: str, slo: str, what: str, target: float) -> Iterator[AlertRule]:
    """Yield multiwindow, multi-burn-rate alerts on one objective.

    Source: the Site Reliability Workbook (Beyer et al., O'Reilly 2018), chapter 5, "Alerting on
    SLOs", section 6 and table 5-8. A burn rate of 1 spends the budget, 1 - target, in 30 days; 14.4
    spends 2% of it in an hour, 6 spends 5% in six hours. The short window, a twelfth of the long
    one, ends the alert soon after its cause."""
    budget = 1 - target
    share = f"{{{{ $value | humanizePercentage }}}} of requests to {{{{ $labels.model }}}} {what}"
    for severity, pairs in _BURNS:
        conditions = "\n  or\n".join(_burn_condition(slo, *pair, budget) for pair in pairs)
        enough = f'baton:slo_requests:increase6h{{slo="{slo}"}} >= {_MIN_REQUESTS}'
        yield AlertRule(
            name,
            severity,
            f"(\n{conditions}\n)\nand {enough}",
            f"Too many requests {what}",
            f"{share}; {100 * budget:.4g}% is the budget.",
        )


def _burn_condition(slo: str, factor: float, long: str, short: str, budget: float) -> str:
    most = f"{factor:g} * {budget:.6g}"
    return "\n  and\n".join(
        f'  baton:slo_errors:ratio_rate{window}{{slo="{slo}"}} > {most}' for window in (long, short)
    )


# ---- the pools ----------------------------------------------------------------------------------


def _pools(windows: Windows) -> Iterator[AlertRule]:
    w5, w10 = windows("5m"), windows("10m")
    yield AlertRule(
        "BatonKvPoolFull",
        "ticket",
        f"avg_over_time(baton_kv_cache_usage_ratio[{w5}]) > 0.9\nand on (cluster, model) (\n"
        f"  sum by (cluster, model) (avg_over_time(baton_router_queue_requests[{w5}])) > 0\n"
        "  or sum by (cluster, model)"
        f' (avg_over_time(baton_requests_waiting{{role=~"prefill|decode"}}[{w5}])) > 0\n)',
        "A KV pool is full, and requests wait for pages",
        f"{_PLACE} has {{{{ $value | humanizePercentage }}}} of its KV pages in use.",
    )
    failed = f"sum by (cluster, model) (increase(baton_kv_transfer_failures_total[{w10}])) > 2"
    yield AlertRule(
        "BatonTransfersFail",
        "ticket",
        f"baton:kv_transfer_failures:ratio_rate5m > 0.02\nand {failed}",
        "Transfers of KV between workers fail",
        "{{ $value | humanizePercentage }} of the transfers of {{ $labels.model }} failed;"
        " prompts were computed again.",
    )
    yield AlertRule(
        "BatonIndexStale",
        "ticket",
        "baton_index_staleness_seconds > 10",
        "A router's prefix index is out of date",
        "Router {{ $labels.replica }}'s data about the workers' caches is {{ $value |"
        " humanizeDuration }} old.",
        lasts=windows("1m"),
    )


# ---- processes ----------------------------------------------------------------------------------


def _flapping(windows: Windows) -> Iterator[AlertRule]:
    """Yield alerts on engines that restart and on workers that flap.

    A flapping worker appeared and disappeared within the window and lived shortly. Workers that an
    update replaces existed before it, or lived long. In the first half hour of Prometheus itself
    this is unknown, and the alert does not fire."""
    w1, w15, w30 = windows("1m"), windows("15m"), windows("30m")
    yield AlertRule(
        "BatonEngineRestarts",
        "ticket",
        f"round(increase(baton_engine_restarts_total[{w15}])) >= 3",
        "A worker's engine dies repeatedly",
        f"{_PLACE} has replaced its engine {{{{ $value }}}} times.",
    )
    short = (  # a lent worker still exists, in the other role
        f"count_over_time(up{{{_WORKER}}}[{w30}:{w1}]) <= {_SHORT_MINUTES}\n"
        f"  unless ignoring (role) up{{{_WORKER}}} offset {w30}\n"
        f"  unless ignoring (role) up{{{_WORKER}}}"
    )
    looked = f'group by (cluster) (up{{job="baton"}} offset {w30})'
    yield AlertRule(
        "BatonWorkerFlapping",
        "ticket",
        f"count by (cluster, model, role) (\n  {short}\n) >= 3\nand on (cluster) {looked}",
        "Workers come and go",
        "{{ $value }} {{ $labels.role }} workers of {{ $labels.model }} have come and gone within"
        " half an hour, each after ten minutes or less.",
    )


def _missing(windows: Windows) -> Iterator[AlertRule]:
    yield AlertRule(
        "BatonNoDecodeWorker",
        "page",
        "baton_router_decode_workers == 0",
        "A router has no decode worker",
        "Router {{ $labels.replica }} at {{ $labels.instance }} can serve no request for"
        " {{ $labels.model }}.",
        lasts=windows("1m"),
    )
    ready = 'baton_replicas{role="prefill", state="ready"}'
    of = "max by (cluster, model)"
    yield AlertRule(
        "BatonNoPrefillWorker",
        "ticket",
        f"{of} ({ready}) == 0\nand {of} (max_over_time({ready}[{windows('1h')}])) > 0",
        "No prefill worker is left",
        "Decode workers of {{ $labels.model }} compute all prompts themselves.",
        lasts=windows("2m"),
    )
    yield AlertRule(
        "BatonRouterDown",
        "page",
        'absent(up{job="baton", role="router"} == 1)',
        "No router answers",
        "Prometheus reaches no router, and clients probably reach none either.",
        lasts=windows("1m"),
    )
    yield AlertRule(
        "BatonTargetDown",
        "ticket",
        'up{job="baton"} == 0',
        "The metrics of a process cannot be read",
        f"{_PLACE} is registered, but cannot be scraped.",
        lasts=windows("2m"),
    )


# ---- the autoscaler and certificates -------------------------------------------------------------

_MAX_AGE_S = 60
_OF = "max by (cluster, model)"


def _autoscaler(windows: Windows) -> Iterator[AlertRule]:
    """Yield the alerts on the autoscaler; none fires in a cluster without one."""
    yield AlertRule(
        "BatonSloInfeasible",
        "ticket",
        "max by (cluster, model, slo) (baton_slo_infeasible) == 1",
        "No number of workers meets an objective",
        "The {{ $labels.slo }} objective of {{ $labels.model }} is missed by a single request on an"
        " idle worker.",
        lasts=windows("5m"),
    )
    age = "baton_planner_reading_age_seconds"
    before = f"max_over_time({age}[{windows('30m')}])"
    yield AlertRule(
        "BatonAutoscalerBlind",
        "ticket",
        f"{_OF} ({age}) > {_MAX_AGE_S}\nor ({_OF} ({before}) unless on (cluster, model) {age})",
        "The pools are not sized: the autoscaler has no metrics, or is gone",
        "The pools of {{ $labels.model }} keep their sizes.",
        lasts=windows("2m"),
    )
    yield AlertRule(
        "BatonCorrectionAtBound",
        "ticket",
        "max by (cluster, model, correction) (baton_correction_at_bound) == 1",
        "Predictions of the autoscaler are wrong by a factor of two or more",
        "Observed over predicted ({{ $labels.correction }}) of {{ $labels.model }} is at its bound:"
        " the pools have a wrong size.",
        lasts=windows("10m"),
    )
    of = "max by (cluster, model, role)"
    yield AlertRule(
        "BatonScalingBehind",
        "ticket",
        f"{of} (baton_desired_replicas) > {of} (baton_actual_replicas)\n"
        f'and on (cluster, model) {_OF} (baton_autoscaler_mode{{mode="act"}}) == 1',
        "Wanted workers do not start",
        "For 10 minutes there have been fewer {{ $labels.role }} workers of {{ $labels.model }}"
        " than the autoscaler wants: {{ $value }} are wanted.",
        lasts=windows("10m"),
    )


_CERTIFICATE_DAYS: tuple[tuple[Severity, int], ...] = (("ticket", 14), ("page", 2))


def _certificates() -> Iterator[AlertRule]:
    left = "baton_certificate_not_after_seconds - time()"
    text = (
        f"The {{{{ $labels.use }}}} certificate of {_PLACE} expires in"
        " {{ $value | humanizeDuration }}."
    )
    for severity, days in _CERTIFICATE_DAYS:
        yield AlertRule(
            "BatonCertificateEnds",
            severity,
            f"{left} < {days} * {_DAY_S}",
            f"A certificate expires within {days} days",
            text,
        )
