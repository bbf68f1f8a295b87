"""Workers and machines, from records."""

from __future__ import annotations

import math

import pytest

from cluster.observation import workers
from cluster.sizing.snapshot import WorkerPhase
from tests.cluster.observation.records import STEP, WALLS, worker

DECODES_ONLY = (*STEP[:3], 0.0, 0.0)


def test_a_worker() -> None:
    seen = workers.worker_snapshot(worker("a", "decode"), young=False)
    assert (seen.home, seen.role, seen.state, seen.kv_tokens) == (
        "decode",
        "decode",
        "serving",
        100,
    )


@pytest.mark.parametrize(
    ("fields", "young", "state"),
    [
        ({}, False, "serving"),
        ({}, True, "warming"),
        ({"engine_pid": 0}, False, "warming"),
        ({"draining": True}, True, "leaving"),
        ({"draining": True, "changing": True}, False, "changing"),
    ],
)
def test_states(fields: dict[str, object], young: bool, state: WorkerPhase) -> None:
    assert workers.worker_snapshot(worker("a", "decode", **fields), young=young).state == state


def test_one_that_changes_counts_for_the_role_that_it_takes() -> None:
    seen = workers.worker_snapshot(worker("a", "decode", changing=True), young=False)
    assert (seen.home, seen.role) == ("decode", "prefill")


def test_a_record_without_a_home_is_at_home() -> None:
    assert workers.home_role(worker("a", "decode", home="")) == "decode"
    assert workers.home_role(worker("a", "decode", home="prefill")) == "prefill"


def test_more_free_than_there_is_means_nothing_resident() -> None:
    seen = workers.worker_snapshot(worker("a", "decode", kv_tokens_free=5000), young=False)
    assert seen.kv_tokens == 0


def test_machines_are_medians_by_home() -> None:
    slow = tuple(100 * c for c in STEP)
    found = workers.machine_models(
        [
            *(worker(f"p{i}", "prefill", kv_tokens_total=t) for i, t in enumerate((10, 20, 1000))),
            worker("d", "decode", step_model=slow, walls=WALLS, link_bytes_s=1e9),
            worker("lent", "prefill", home="decode", step_model=slow, walls=WALLS),
        ]
    )
    assert found["prefill"].step == pytest.approx(STEP)
    assert found["prefill"].kv_tokens == 20
    assert (found["prefill"].chunk, found["prefill"].max_batch) == (256, 16)
    assert (found["prefill"].kv_bytes, found["prefill"].link_bytes_s) == (1000, 0)
    assert found["decode"].step == pytest.approx(slow)
    assert (found["decode"].kv_bytes, found["decode"].link_bytes_s) == (250, 1e9)


def test_what_a_pool_has_not_done_is_taken_from_the_other() -> None:
    found = workers.machine_models(
        [worker("p", "prefill"), worker("d", "decode", step_model=DECODES_ONLY)]
    )
    assert found["decode"].step == pytest.approx(STEP)
    found = workers.machine_models([worker("p", "prefill"), worker("d", "decode", step_model=())])
    assert found["decode"].step == pytest.approx(STEP)


def test_pools_that_nothing_is_known_of_are_left_out() -> None:
    assert workers.machine_models([worker("p", "prefill", step_model=())]) == {}
    assert set(workers.machine_models([worker("p", "prefill")])) == {"prefill"}
    dead = worker("d", "decode", engine_pid=0)
    assert set(workers.machine_models([worker("p", "prefill"), dead])) == {"prefill"}


def test_figures_that_no_worker_has_are_not_known() -> None:
    mad = worker(
        *("p", "prefill"),
        kv_tokens_total=10**18,
        max_batch=-3,
        prefill_chunk=0,
        link_bytes_s=math.nan,
        queued_tokens=10**18,
        step_model=(math.nan,) * 5,
    )
    assert workers.machine_models([mad]) == {}
    found = workers.machine_models([mad, worker("q", "prefill", queued_tokens=7)])["prefill"]
    assert found == workers.machine_models([worker("q", "prefill")])["prefill"]
    assert workers.backlog_tokens([mad, worker("q", "prefill", queued_tokens=7)]) == 7
    alone = workers.machine_models(
        [worker("p", "prefill", max_batch=-3, prefill_chunk=0, kv_tokens_total=10**18)]
    )["prefill"]
    assert (alone.max_batch, alone.chunk, alone.kv_tokens) == (1, 512, 0)


def test_pace_is_that_of_sequences() -> None:
    quick = worker("a", "decode", pace=3.0, running=3)
    plain = worker("b", "decode", pace=1.0, running=1)
    assert workers.typical_pace([quick, plain, worker("p", "prefill", pace=9.0)]) == 2.5
    assert workers.typical_pace([worker("a", "decode", pace=3.0), worker("b", "decode")]) == 2.0
    assert workers.typical_pace([]) == 1.0
    assert workers.typical_pace([worker("a", "decode", pace=math.nan)]) == 1.0
