"""The autoscaler's own metrics, of its last decision.

Everything has the labels ``model`` and ``role``, gauges ``replica`` as well. ``role`` is the pool's
where a figure belongs to one, else ``autoscaler``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.autoscale.loop import AutoscalerTurn
from cluster.sizing.corrections import CORRECTIONS, bounded_corrections
from cluster.sizing.decision import RoleDemand, ScalingReason
from cluster.sizing.snapshot import SizingSnapshot, WorkerCounts, staying
from cluster.sizing.worker_counts import count_starting
from cluster.worker.metric_families import LABELS, gauge, labelled_gauge
from cluster.worker.metrics import REPLICA_CHARS
from protocol.roles import ROLES

OWN = "autoscaler"
MODES = ("act", "advise", "watch")
"""watch: this autoscaler may act, but another one holds the lease."""
FAILURES = ("turn", "lease", "replicas", "loan", "log")
REASONS: tuple[str, ...] = get_args(ScalingReason)
SLOS = ("ttft", "tpot")


class AutoscalerFigures:
    """Totals over all turns so far. ``model``: returns the model's name, once it is known."""

    def __init__(self, model: Callable[[], str], instance: str, failures: Counter[str]) -> None:
        self.model = model
        self.replica = instance[:REPLICA_CHARS]
        self.failures = failures
        self.decisions: Counter[str] = Counter()
        self.worker_seconds: Counter[str] = Counter()
        self.is_advisory = False
        self.began_s = time.monotonic()
        self.last: AutoscalerTurn | None = None

    def take(self, turn: AutoscalerTurn) -> None:
        """Add a turn; the number of workers counts as constant between two turns."""
        if self.last is not None:
            before = self.last.record.snapshot
            elapsed_s = max(0.0, turn.record.snapshot.at_s - before.at_s)
            held = count_paid(before)
            for role in ROLES:
                self.worker_seconds[role] += held.of(role) * elapsed_s  # type: ignore[assignment]
        self.decisions[turn.record.decision.reason] += 1
        self.last = turn

    def age_s(self) -> float:
        """Return the age of the metrics behind the last decision; the process's age where there
        were none."""
        if self.last is None or self.last.reading.age_s is None:
            return time.monotonic() - self.began_s
        return time.monotonic() - self.last.reading.at_s + self.last.reading.age_s


def count_by_role(snapshot: SizingSnapshot) -> WorkerCounts:
    """Return the workers by the role that they serve, without those that leave."""
    return WorkerCounts.count(worker.role for worker in staying(snapshot.workers))


def count_paid(snapshot: SizingSnapshot) -> WorkerCounts:
    """Return the workers that hold a machine: from asking for them until they are gone."""
    roles, coming = [worker.role for worker in snapshot.workers], count_starting(snapshot)
    return WorkerCounts(**{role: roles.count(role) + coming.of(role) for role in ROLES})


def metrics_page(figures: AutoscalerFigures) -> Callable[[], bytes]:
    made = CollectorRegistry()
    made.register(AutoscalerCollector(figures))
    ProcessCollector(registry=made)
    return lambda: generate_latest(made)


class AutoscalerCollector(Collector):
    """Everything under ``baton_``."""

    def __init__(self, figures: AutoscalerFigures) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()  # not before the model is known

    def collect(self) -> Iterator[Metric]:
        yield from self._totals()
        own = self._own()
        age = "Age of the metrics behind the last decision"
        yield gauge("planner_reading_age_seconds", age, own, self._figures.age_s())
        if self._figures.last is not None:
            yield from self._pools(self._figures.last)
            yield from self._service(self._figures.last, own)

    def _own(self) -> list[str]:
        return [self._figures.model(), OWN, self._figures.replica]

    def _totals(self) -> Iterator[Metric]:
        figures, model = self._figures, self._figures.model()
        decided, failed, held = (
            CounterMetricFamily(f"baton_{name}", text, labels=[*LABELS, *by])
            for name, text, by in (
                ("scaling_decisions", "Decisions, by their main reason", ["reason"]),
                ("autoscaler_failures", "Parts of turns that failed", ["what"]),
                (
                    "worker_seconds",
                    "Time of all workers, from the request for a worker until it is gone",
                    [],
                ),
            )
        )
        for reason in REASONS:
            decided.add_metric([model, OWN, reason], figures.decisions[reason])
        for what in FAILURES:
            failed.add_metric([model, OWN, what], figures.failures[what])
        for role in ROLES:
            held.add_metric([model, role], figures.worker_seconds[role])
        yield from (decided, failed, held)

    def _pools(self, turn: AutoscalerTurn) -> Iterator[Metric]:
        snapshot, made = turn.record.snapshot, turn.record.decision
        needed: dict[str, RoleDemand | None] = {"prefill": made.prefill, "decode": made.decode}
        present, starting, corrections = (
            count_by_role(snapshot),
            count_starting(snapshot),
            made.memory.corrections,
        )
        for role_of, name, text in (
            (made.wanted.of, "desired_replicas", "Workers that are wanted, within the limits"),
            (
                present.of,
                "actual_replicas",
                "Workers that are present, by the role that they serve",
            ),
            (
                starting.of,
                "starting_replicas",
                "Workers that were requested but are not present yet",
            ),
            (corrections.of, "correction_factor", "Observed to predicted"),
        ):
            yield self._by_role(name, text, {role: role_of(role) for role in ROLES})
        known = {role: need for role, need in needed.items() if need is not None}
        text = "Workers that the load needs, before limits"
        yield self._by_role("needed_replicas", text, {r: n.workers for r, n in known.items()})
        text = "Busy prefill workers (erlangs); sequences that decode at the same time"
        yield self._by_role("pool_load", text, {r: n.load for r, n in known.items()})

    def _by_role(self, name: str, text: str, values: dict[str, float]) -> Metric:
        metric = GaugeMetricFamily(f"baton_{name}", text, labels=[*LABELS, "replica"])
        for role, value in values.items():
            metric.add_metric([self._figures.model(), role, self._figures.replica], value)
        return metric

    def _service(self, turn: AutoscalerTurn, own: list[str]) -> Iterator[Metric]:
        predicted, observed = turn.record.decision.predicted, turn.record.snapshot.observed
        for name, text, value in (
            (
                "predicted_ttft_seconds",
                "Predicted for this load with the workers that serve now",
                predicted.ttft_s,
            ),
            (
                "predicted_tpot_seconds",
                "Predicted for this load with the workers that serve now",
                predicted.tpot_s,
            ),
            ("observed_ttft_seconds", "Observed mean over the window", observed.ttft_s),
            ("observed_tpot_seconds", "Observed mean over the window", observed.tpot_s),
        ):
            if value is not None:
                yield gauge(name, text, own, value)
        kv = turn.record.decision.memory.corrections.kv
        text = "Observed over expected KV of a decoding sequence"
        yield gauge("resident_kv_correction_factor", text, own, kv)
        bounded = bounded_corrections(turn.record.decision.memory.corrections)
        text = "1: the correction is as large or as small as it may be"
        values: list[tuple[str, float]] = [(name, name in bounded) for name in CORRECTIONS]
        yield labelled_gauge("correction", "correction_at_bound", text, own, values)
        error = turn.record.decision.forecast_error
        values = [] if error is None else list(msgspec.structs.asdict(error).items())
        text = "Observed value over the value forecast a minute ago, less 1"
        yield labelled_gauge("figure", "forecast_error_ratio", text, own, values)
        missed = turn.record.decision.slo_infeasible
        text = "1: no number of workers meets the objective"
        values = [(slo, slo in missed) for slo in SLOS]
        yield labelled_gauge("slo", "slo_infeasible", text, own, values)
        mode = "advise" if self._figures.is_advisory else "act" if turn.record.acted else "watch"
        values = [(each, each == mode) for each in MODES]
        text = "1: the present mode; watch: another autoscaler acts"
        yield labelled_gauge("mode", "autoscaler_mode", text, own, values)
        reason = turn.record.decision.reason
        values = [(each, each == reason) for each in REASONS]
        yield labelled_gauge(
            "reason", "scaling_reason", "1: the reason of the last decision", own, values
        )
