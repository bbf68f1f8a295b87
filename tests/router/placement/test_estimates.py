from __future__ import annotations

import random
from statistics import median

import pytest

from protocol.wire import wire_pb2 as pb
from router.placement.cost import PATH_S
from router.placement.estimates import (
    CORRECTION_RANGE,
    INITIAL_BANDWIDTH,
    MAX_SESSIONS,
    RoutingEstimates,
)


def test_a_link_is_as_fast_as_its_tails_were() -> None:
    learned = RoutingEstimates()
    assert learned.network({}).share("p", "d") == INITIAL_BANDWIDTH
    for _ in range(50):
        learned.record_transfer(
            "d",
            pb.Measured(
                prefill_instance="p", kv_tokens=100, kv_bytes=900, tail_bytes=500, tail_seconds=0.5
            ),
        )
    net = learned.network({("p", "d"): 1})
    assert net.share("p", "d") == pytest.approx(1000 / 2)
    assert net.share("p", "e") < INITIAL_BANDWIDTH / 100, (
        "a new link is taken to be like the others"
    )
    assert learned.kv_bytes(4096) == pytest.approx(9.0)


def test_a_hand_over_without_a_tail_says_nothing_of_the_link() -> None:
    learned = RoutingEstimates()
    learned.record_transfer("d", pb.Measured(prefill_instance="p"))
    assert learned.network({}).share("p", "d") == INITIAL_BANDWIDTH
    assert learned.kv_bytes(4096) == 4096


def test_the_correction_follows_and_keeps_within_its_bounds() -> None:
    learned = RoutingEstimates()
    assert learned.correction("p") == 1.0
    for _ in range(60):
        learned.record_first_token("p", 0.1, 0.15)
    assert learned.correction("p") == pytest.approx(1.5, rel=0.01)
    for ratio in (1000.0, 0.0):
        for _ in range(100):
            learned.record_first_token("p", 0.1, 0.1 * ratio)
        low, high = CORRECTION_RANGE
        bound = high if ratio else low
        assert learned.correction("p") == pytest.approx(bound)


def test_both_factors_together_reach_the_squares_of_the_bounds() -> None:
    low, high = CORRECTION_RANGE
    for ratio, bound in ((1000.0, high), (0.0, low)):
        learned = RoutingEstimates()
        for _ in range(100):
            learned.record_first_token("p", 0.2, 0.2 * ratio, neighbours=3)
        assert learned.correction("p", 3) == pytest.approx(bound**2)
        assert learned.correction("p") == pytest.approx(bound)


def test_a_stall_weighs_as_much_as_the_same_gain() -> None:
    learned = RoutingEstimates()
    for observed_s in (0.4, 0.1) * 100:
        learned.record_first_token("p", 0.2, observed_s)
    assert learned.correction("p") == pytest.approx(1.0, abs=0.1), "the mean ratio is 1.25"


def test_requests_that_were_stalled_move_the_factor_little() -> None:
    learned = RoutingEstimates()
    for observed_s in (0.2, 0.2, 0.2, 2.0) * 50:
        learned.record_first_token("p", 0.2, observed_s)
    assert learned.correction("p") < 1.1, "the geometric mean is 1.8"


def test_engines_that_share_cores_slow_each_other_by_their_number() -> None:
    """Four engines on two cores. Their step times are those of the mean of what they have seen."""
    draw = random.Random(1)
    learned, single, errors, single_errors = RoutingEstimates(), 1.0, [], []
    for turn in range(400):
        worker, neighbours = f"p{turn % 2}", draw.randrange(4)
        observed_s = max(1.0, (neighbours + 1) / 2) / 1.4 * draw.lognormvariate(0.0, 0.1)
        predicted_s = learned.correction(worker, neighbours)
        learned.record_first_token(worker, 1.0, observed_s, neighbours)
        errors.append(abs(predicted_s - observed_s) / observed_s)
        single_errors.append(abs(single - observed_s) / observed_s)
        single += 0.1 * (observed_s - single)
    assert median(errors[100:]) < 0.1
    assert median(single_errors[100:]) > 0.25, "one factor that ignores the load"
    alone, crowded = learned.correction("p9", 0), learned.correction("p9", 7)
    assert alone == 1.0 and crowded == learned.correction("p9", 3) > 1.5, "as the nearest number"


def test_the_way_to_a_worker_is_learned() -> None:
    learned = RoutingEstimates()
    for _ in range(60):
        learned.record_path("p", "d", 0.02)
        learned.record_path("p", "d", -1.0)
    assert learned.network({}).path_s[("p", "d")] == pytest.approx(0.02, rel=0.01)
    for seconds in (0.02, 0.02, 0.02, 0.9) * 20:
        learned.record_path("p", "d", seconds)
    assert learned.network({}).path_s[("p", "d")] < 0.035, "the mean is 0.24"
    assert ("p", "e") not in learned.network({}).path_s
    assert PATH_S < 0.02


def test_the_first_values_weigh_more() -> None:
    """One of eight routers sees a few requests a minute on each link."""
    learned = RoutingEstimates()
    for _ in range(6):
        learned.record_path("p", "d", 0.02)
        learned.record_first_token("p", 0.1, 0.13)
    assert learned.network({}).path_s[("p", "d")] == pytest.approx(0.02, rel=0.3)
    assert learned.correction("p") == pytest.approx(1.3, rel=0.05)


def test_a_few_short_prompts_say_little_of_long_ones() -> None:
    """The first requests of a new cluster are a few tokens long, and their workers do not know
    their own steps yet. A worker that looks slow since then would be avoided, and so stay slow."""
    learned = RoutingEstimates()
    for _ in range(3):
        learned.record_first_token("d", 0.01, 0.08)
    assert learned.correction("d") < 1.05
    for _ in range(300):  # where all prompts are short, the factor is theirs
        learned.record_first_token("d", 0.01, 0.015)
    assert learned.correction("d") == pytest.approx(1.5, rel=0.01)


def test_what_is_known_of_workers_that_left_is_dropped() -> None:
    learned = RoutingEstimates()
    for name in ("p", "q"):
        learned.record_path(name, "d", 0.02)
        learned.record_first_token(name, 0.1, 0.2)
    learned.retain({"p", "d"})
    assert list(learned.network({}).path_s) == [("p", "d")]
    assert learned.correction("p") > learned.correction("q") == 1.0


def test_sessions_are_remembered_within_a_bound() -> None:
    learned = RoutingEstimates()
    learned.sessions.record(b"", ("p", "d"))
    assert learned.sessions.find(b"") == ()
    for number in range(MAX_SESSIONS + 1):
        learned.sessions.record(b"%d" % number, ("p", "d"))
    assert learned.sessions.find(b"0") == ()
    assert learned.sessions.find(b"1") == ("p", "d")
