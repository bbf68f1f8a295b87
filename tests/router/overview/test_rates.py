"""What is known of a window when processes were silent at its beginning, or were not there yet."""

from __future__ import annotations

import pytest

from router.overview.overview import ClusterOverview, cluster_overview
from router.overview.prometheus_text import MetricsPage, MetricsSnapshot, parse_page
from router.overview.rates import ScrapeHistory
from router.overview.scraper import ScrapeResult, TargetGroup

EPOCH = 1e9
"""Of the first look, which is at 0 s; the window is 20 s."""
LONG_AGO = EPOCH - 3600

GROUPS = [
    TargetGroup(["r"], {"__meta_baton_role": "router"}),
    TargetGroup(["s"], {"__meta_baton_role": "router"}),
    TargetGroup(["w"], {"__meta_baton_role": "decode"}),
]


def router(failed: int, began: float = LONG_AGO) -> MetricsPage:
    return parse_page(
        f'baton_requests_total{{status="500"}} {failed}\n'
        f"process_start_time_seconds {began}\nbaton_router_decode_workers 1\n"
    )


def worker(tokens: int, began: float = LONG_AGO) -> MetricsPage:
    return parse_page(
        f"baton_engine_up 1\nbaton_generation_tokens_total {tokens}\n"
        f"process_start_time_seconds {began}\n"
    )


def shown(
    *looks: dict[str, MetricsPage] | tuple[dict[str, MetricsPage], set[str]],
) -> ClusterOverview:
    """The last of these looks, which are 10 s apart; of each: pages, and who was silent."""
    past = ScrapeHistory()
    for i, look in enumerate(looks):
        pages, silent = look if isinstance(look, tuple) else (look, set())
        moment = MetricsSnapshot(10.0 * i, pages, frozenset(silent))
        seen = ScrapeResult(GROUPS, moment, dict.fromkeys(silent, "late"))
        found = cluster_overview("", seen, past.add(moment), EPOCH + 10 * i)
    return found


def test_a_missed_look_makes_no_figures() -> None:
    """All that a process ever did is not what it did since."""
    there = {"r": router(40), "w": worker(3_000_000)}
    found = shown(({}, {"r", "w"}), there)
    assert found.router.requests == {}
    assert found.router.requests_per_s is None
    assert found.workers[0].tokens_per_s is None
    assert "failed" not in str(found.verdict.reasons)


def test_a_window_of_its_own_follows_a_missed_look() -> None:
    found = shown(
        ({"r": router(40)}, {"w"}),
        {"r": router(40), "w": worker(3_000_000)},
        {"r": router(50), "w": worker(3_000_200)},
    )
    assert found.router.requests_per_s == 10 / 20
    assert found.workers[0].tokens_per_s == 200 / 10


def test_a_process_that_nobody_knew_before_and_is_old() -> None:
    found = shown({"r": router(40)}, {"r": router(40), "s": router(7)})
    assert found.router.requests == {}
    assert found.router.requests_per_s == 0


@pytest.mark.parametrize("look", [1, 2])
def test_all_that_a_young_process_did_is_of_the_window(look: int) -> None:
    young = {"w": worker(200, EPOCH + 5)}
    looks = [{"r": router(40)}, {"r": router(40)}, {"r": router(40)} | young]
    looks[look] |= young
    found = shown(*looks)
    assert found.workers[0].tokens_per_s == 200 / 20


def test_a_process_that_was_silent_first_is_not_young() -> None:
    """Its clock may be another's."""
    found = shown(({"r": router(40)}, {"w"}), {"r": router(40), "w": worker(200, EPOCH + 5)})
    assert found.workers[0].tokens_per_s is None
