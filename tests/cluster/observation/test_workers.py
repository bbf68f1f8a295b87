"""Workers and machines, from records."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from cluster.observation import workers
from cluster.sizing.predict import relative_speed
from cluster.sizing.snapshot import WorkerPhase
from protocol.performance.speculation_profile import SpeculationProfile
from tests.cluster.observation.records import STEP, WALLS, worker
from tests.cluster.sizing.worlds import GOALS, mix

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


def test_what_a_worker_has_computed_is_known_once_it_is_measured() -> None:
    walls = replace(WALLS, prompt_tokens_s=300.0)
    measured = workers.worker_snapshot(worker("a", "prefill", walls=walls), young=False)
    assert (measured.busy, measured.prompt_tokens_s) == (0.5, 300.0)
    unknown = workers.worker_snapshot(worker("a", "prefill"), young=False)
    assert (unknown.busy, unknown.prompt_tokens_s) == (0.0, 0.0)


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


@pytest.mark.parametrize("seen", [(), (16.0, 32768.0, 2048.0)])
def test_a_lent_worker_of_the_same_machine_counts_as_one(seen: tuple[float, ...]) -> None:
    """A prefill worker has measured the constant of a step, but no decode row."""
    prompts_only = (1.2 * STEP[0], 0.0, 0.0, *STEP[3:], *seen)
    decodes = (*DECODES_ONLY, *(seen and (64.0, 2e5, 256.0)))
    found = workers.machine_models(
        [worker("p", "prefill", step_model=prompts_only), worker("d", "decode", step_model=decodes)]
    )
    assert found["prefill"].step[:5] == pytest.approx((1.2 * STEP[0], *STEP[1:]))
    assert found["decode"].step[:5] == pytest.approx(STEP)
    assert relative_speed("decode", "prefill", mix(1.0), found, GOALS) == 1.0
    assert relative_speed("prefill", "decode", mix(1.0), found, GOALS) == 1.0


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


def test_drafts_of_a_pool_are_the_median_of_its_workers() -> None:
    told = [
        SpeculationProfile(accept=(0.8, 0.6), row_s=1e-5, most_nodes=256),
        SpeculationProfile(accept=(0.7, 0.7, 0.5), row_s=3e-5, most_nodes=64),
        SpeculationProfile(accept=(0.2, 0.2), row_s=2e-5, most_nodes=64),
    ]
    drafting = [worker(f"d{i}", "decode", speculation=told[i]) for i in range(3)]
    absurd = worker("x", "decode", speculation=SpeculationProfile(accept=(math.nan,)))
    found = workers.machine_models([worker("p", "prefill"), *drafting, absurd])
    assert found["decode"].speculation == SpeculationProfile(
        accept=(0.7, 0.6), row_s=2e-5, most_nodes=64
    )
    assert found["prefill"].speculation is None
    few = workers.machine_models([drafting[0], absurd, worker("e", "decode")])
    assert few["decode"].speculation is None, "most draft nothing"


def test_machines_say_what_their_coefficients_were_fitted_to() -> None:
    pool = [
        worker(f"d{i}", "decode", step_model=(*STEP, n, 1e5, 512.0))
        for i, n in enumerate((16.0, 64.0, 32.0))
    ]
    found = workers.machine_models(pool)["decode"].step
    assert found[5:] == (32.0, 1e5, 512.0)
    old = workers.machine_models([*pool[:1], worker("e", "decode")])["decode"].step
    assert len(old) == 5, "JSON has no infinity"
