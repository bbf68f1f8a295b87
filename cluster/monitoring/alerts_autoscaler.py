"""Alerts about the autoscaler: what it cannot do, does not know, or does not get."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.monitoring.alert import Alert
from cluster.monitoring.windows import Windows

_OLD_S = 60
_OF = "max by (cluster, model)"


def autoscaler(windows: Windows) -> Iterator[Alert]:
    """Of a cluster without an autoscaler none fires."""
    yield Alert(
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
    yield Alert(
        "BatonAutoscalerBlind",
        "ticket",
        f"{_OF} ({age}) > {_OLD_S}\nor ({_OF} ({before}) unless on (cluster, model) {age})",
        "The pools are not sized: the autoscaler has no metrics, or is gone",
        "The pools of {{ $labels.model }} stay as they are.",
        lasts=windows("2m"),
    )
    of = "max by (cluster, model, role)"
    yield Alert(
        "BatonScalingBehind",
        "ticket",
        f"{of} (baton_desired_replicas) > {of} (baton_actual_replicas)\n"
        f'and on (cluster, model) {_OF} (baton_autoscaler_mode{{mode="act"}}) == 1',
        "Workers that are wanted do not come",
        "For 10 minutes there have been fewer {{ $labels.role }} workers of {{ $labels.model }}"
        " than the autoscaler wants: {{ $value }} are wanted.",
        lasts=windows("10m"),
    )
