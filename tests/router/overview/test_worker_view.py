"""The view of one worker: where it runs."""

from __future__ import annotations

import pytest

from router.overview.prometheus_text import MetricsSnapshot
from router.overview.rates import RateWindow
from router.overview.scraper import ScrapeResult, TargetGroup
from router.overview.worker_view import worker_view


@pytest.mark.parametrize(
    ("target", "host"),
    [("10.0.0.7:9100", "10.0.0.7"), ("[fd00::7]:9100", "fd00::7"), ("node-7:9100", "node-7")],
)
def test_view_names_the_host_of_a_worker_that_does_not_answer_either(
    target: str, host: str
) -> None:
    group = TargetGroup([target], {"__meta_baton_role": "decode", "__meta_baton_instance": "d"})
    snapshot = MetricsSnapshot(0.0, {}, frozenset([target]))
    scraped = ScrapeResult([group], snapshot, {target: "cannot be reached"})
    view = worker_view(group, scraped, RateWindow(snapshot, None))
    assert (view.host, view.state) == (host, "silent")
