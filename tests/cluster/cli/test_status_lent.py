"""A worker that is lent shows where it works, and as what."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from cluster.cli.status_view import _workers
from router.overview.prometheus_text import MetricsSnapshot
from router.overview.rates import RateWindow
from router.overview.scraper import ScrapeResult, TargetGroup
from router.overview.worker_view import worker_view


@pytest.mark.parametrize(
    ("home", "state", "shown"),
    [
        ("prefill", "ready", "lent"),
        ("prefill", "draining", "draining"),
        ("decode", "ready", "ready"),
        ("", "ready", "ready"),  # of a worker that does not say
    ],
)
def test_lent_worker_is_marked_in_its_row(home: str, state: str, shown: str) -> None:
    labels = {"role": "decode", "home": home, "instance": "0123456789"}
    group = TargetGroup(["h:1"], {f"__meta_baton_{k}": v for k, v in labels.items()})
    seen = ScrapeResult([group], MetricsSnapshot(0.0, {}), {})
    view = worker_view(group, seen, RateWindow(seen.snapshot, None, 0.0))
    view = msgspec.structs.replace(view, state=state)
    file = io.StringIO()
    Console(file=file, width=60).print(_workers([view], "#.", 60))
    assert file.getvalue().splitlines()[1].split()[:3] == ["012345", "decode", shown]
