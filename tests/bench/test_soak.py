"""What the soak and the overload benchmark count as a fault."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from bench.chaos.leaks import FDS_SLACK, RSS_SLACK, ProcessHistory, ProcessSize
from bench.chaos.soak import SoakResult
from bench.chaos.tenants import SideCounts
from bench.lib import http_load
from bench.lib.http_load import leave_client_core, take_client_core
from bench.lib.oracle import StreamRecord
from bench.lib.report import ResultRow
from bench.overload import missed_aims

TEXT = [5, 6, 7]


@pytest.mark.parametrize(
    ("seen", "counts"),
    [
        (StreamRecord(TEXT, done=True), (0, 0, 0)),
        (StreamRecord(TEXT[:2], error="the decode worker was lost"), (0, 1, 0)),
        (StreamRecord(TEXT[:2]), (0, 1, 0)),
        (StreamRecord(TEXT, done=False), (0, 1, 0)),
        (StreamRecord([5, 6, 6], done=True), (1, 0, 0)),
        (StreamRecord([5, 5]), (1, 0, 0)),
        (StreamRecord([*TEXT, 8], done=True), (1, 0, 0)),
        (StreamRecord(error="429 later"), (0, 0, 1)),
        (StreamRecord(error="503 no worker"), (0, 0, 1)),
        (StreamRecord(error="500 a bug"), (0, 1, 0)),
        (StreamRecord(), (0, 1, 0)),
    ],
    ids=str,
)
def test_streams_are_right_wrong_lost_or_refused(
    seen: StreamRecord, counts: tuple[int, int, int]
) -> None:
    result = SoakResult()
    said = result.check([seen], [TEXT])
    assert (result.wrong, result.lost, result.refused) == counts
    assert len(said) == len(result.faults) == result.wrong + result.lost


def test_other_clients_must_be_served_and_the_flood_be_refused() -> None:
    counts = SideCounts(Counter({"flood: 200": 9, "flood: 429": 9, "slow: 200": 1}))
    assert counts.check_service() == ["no client of the kind 'vanishing' was served"]
    counts.answers["vanishing: 200"] = 1
    counts.huge_s += [0.1, 9.0, 0.1]
    assert not counts.check_service()
    counts.huge_s += [9.0, 9.0]
    counts.answers["flood: 429"] = 0
    assert len(counts.check_service()) == 2


def history(*sizes: tuple[float, int, int]) -> ProcessHistory:
    return ProcessHistory("p", [ProcessSize(*size) for size in sizes])


def test_growth_beyond_the_slack_is_a_leak() -> None:
    flat = (100.0, 20, 5)
    assert not history(flat, flat, flat, flat).faults()
    fat = (101.0 + RSS_SLACK, 20, 5)
    assert "MiB resident grew from 100 to" in history(flat, flat, fat, fat).faults()[0]
    assert not history(flat, flat, fat, flat).faults(), "it was given back"
    assert not history(flat, fat, fat).faults(), "too few moments for a slope"
    full = (100.0, 21 + FDS_SLACK, 5)
    assert "descriptors" in history(flat, flat, full, full).faults()[0]


def test_aims_that_are_missed_are_named() -> None:
    rows = [
        ResultRow("10x: refusal p99", 120.0, "ms", "aim", 100.0 / 120.0),
        ResultRow("10x: goodput of its peak", 0.95, "", "aim", 0.95 / 0.9),
        ResultRow("1x: goodput", 3.0, "requests/s", "peak of its round", 0.5),
    ]
    assert missed_aims(rows) == ["10x: refusal p99"]


def test_the_client_gets_a_core_that_the_pool_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_load, "LEAST_CORES", 2)
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this machine has one core")
    try:
        core = leave_client_core()
        assert core is not None
        assert os.sched_getaffinity(0) == before - {core}
        take_client_core(core)
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)
