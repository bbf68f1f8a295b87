"""The autoscaler's line, from its real page."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from cluster.autoscale.metrics import AutoscalerFigures, metrics_page
from router.overview.pool_view import AutoscalerView, PoolView, autoscaler_view
from router.overview.prometheus_text import MetricsSnapshot, parse_page
from router.overview.scraper import ScrapeResult, TargetGroup
from tests.cluster.autoscale.test_metrics import busy, turn

WANTED = turn(busy()).record.decision.wanted.prefill


def group(target: str, role: str = "autoscaler") -> TargetGroup:
    return TargetGroup([target], {"__meta_baton_role": role})


def view(*pages: AutoscalerFigures | str) -> AutoscalerView | None:
    """``pages``: of autoscalers; a text: why there is none."""
    groups = [group("r:1", "router"), *(group(f"a:{n}") for n, _ in enumerate(pages))]
    shown = {f"a:{n}": p for n, p in enumerate(pages)}
    found = {
        t: parse_page(metrics_page(p)().decode())
        for t, p in shown.items()
        if isinstance(p, AutoscalerFigures)
    }
    silent = {t: p for t, p in shown.items() if isinstance(p, str)}
    return autoscaler_view(
        ScrapeResult(groups, MetricsSnapshot(0.0, found, frozenset(silent)), silent)
    )


def figures(acted: bool = True, rate: float = 40.0) -> AutoscalerFigures:
    made = AutoscalerFigures(lambda: "m", "a" * 32, Counter())
    decided = turn(busy(rate))
    made.take(decided._replace(record=replace(decided.record, acted=acted)))
    return made


def test_there_is_none() -> None:
    assert view() is None


def test_what_it_wants() -> None:
    found = view(figures())
    assert found is not None
    assert (found.mode, found.reason, found.infeasible) == ("act", "demand", [])
    assert found.pools["prefill"] == PoolView(desired=WANTED, actual=2, starting=0)
    assert found.text.startswith(f"wants {WANTED} prefill (present 2), ")
    assert found.text.endswith(": demand")


def test_the_one_that_acts_is_shown() -> None:
    found = view("does not answer", figures(acted=False), figures(acted=True, rate=0.0))
    assert found is not None
    assert found.text == "wants 2 prefill (present 2), 3 decode (present 3): no metrics"
    watching = view("does not answer", figures(acted=False))
    assert watching is not None and watching.text.startswith(
        f"watches another autoscaler, and would want {WANTED} prefill"
    )


def test_one_that_cannot_be_asked() -> None:
    found = view("does not answer")
    assert found is not None
    assert (found.mode, found.text) == ("", "a:0 does not answer")


def test_before_its_first_decision() -> None:
    found = view(AutoscalerFigures(lambda: "m", "a" * 32, Counter()))
    assert found is not None and found.text == "has not decided anything yet"
