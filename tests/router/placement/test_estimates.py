from __future__ import annotations

import pytest

from protocol.wire import wire_pb2 as pb
from router.placement.cost import PATH_S
from router.placement.estimates import CORRECTION_RANGE, INITIAL_BANDWIDTH, RoutingEstimates


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
    for _ in range(100):
        learned.record_first_token("p", 0.1, 100.0)
        learned.record_first_token("q", 0.1, 0.0)
    assert (learned.correction("q"), learned.correction("p")) == CORRECTION_RANGE


def test_the_way_to_a_worker_and_the_length_of_outputs() -> None:
    learned = RoutingEstimates()
    for _ in range(60):
        learned.record_path("p", "d", 0.02)
        learned.record_path("p", "d", -1.0)
        learned.record_output(40)
    assert learned.network({}).path_s[("p", "d")] == pytest.approx(0.02, rel=0.01)
    assert ("p", "e") not in learned.network({}).path_s
    assert learned.output == pytest.approx(40, rel=0.01)
    assert PATH_S < 0.02


def test_what_is_known_of_workers_that_left_is_dropped() -> None:
    learned = RoutingEstimates()
    for name in ("p", "q"):
        learned.record_path(name, "d", 0.02)
        learned.record_first_token(name, 0.1, 0.2)
    learned.retain({"p", "d"})
    assert list(learned.network({}).path_s) == [("p", "d")]
    assert list(learned._corrections) == ["p"]
