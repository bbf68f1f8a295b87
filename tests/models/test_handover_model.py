"""The hand-over: no token twice, none dropped, every request ends, and no pages are left.

Rules that the model has are broken one by one, and the exploration must find each of them: so it is
known that it can find something.
"""

from __future__ import annotations

import pytest

from decode_worker import candidates
from protocol.retry_budget import DEATH_LIMIT
from tests.models.explorer import Exploration, explore, walk
from tests.models.handover_model import handover_model
from tests.models.handover_states import MAX_DEATHS, MAX_TRANSFERS, Bounds

SMALL = [Bounds(tokens=3, frames=1, faults=1), Bounds(tokens=2, frames=2, faults=1)]
LARGE = [
    Bounds(tokens=3, frames=2, faults=1),
    Bounds(tokens=4, frames=3, faults=1),
    Bounds(tokens=3, frames=2, faults=1, reduced=False),
]

MUTATIONS = {
    # DecodeRequest
    "retried_from_base": "the client got (0, 0)",
    "drop_forgotten": "which no request owns",
    "join_before_last_frame": "the client got (0, -1)",
    "granted_before_reserved": "no pages for it",
    "engine_death_unnoticed": "the request waits for ever",
    "silence_unnoticed": "the request waits for ever",
    # Engine and PrefillService
    "join_ignores_frames": "the client got (0, -1)",
    "checks_ignored": "the client got (0, -1)",
    "released_without_drop": "pages of a prefill worker are never freed",
    # ChoiceStream, Submission and DecodeLink
    "resubmitted_without_tokens": "the client got (0, 0)",
    "any_submission_emits": "the client got",
    "cancel_overtakes_submit": "which the router has given up",
    "cancel_forgotten": "which the router has given up",
    "interruption_drops_queue": "the client got",
    "link_loss_unnoticed": "the request waits for ever",
}


HIDDEN_BY_THE_REDUCTION = {
    "any_submission_emits",
    "cancel_overtakes_submit",
    "released_without_drop",
}


def explored(bounds: Bounds) -> Exploration:
    return explore(handover_model(bounds))


def check(bounds: Bounds) -> None:
    found = explored(bounds)
    assert not found.fault, str(found)
    assert found.states > 1000 and found.ends > 1


@pytest.mark.parametrize("bounds", SMALL, ids=str)
def test_no_token_twice_none_dropped_and_every_request_ends(bounds: Bounds) -> None:
    check(bounds)


@pytest.mark.long
@pytest.mark.parametrize("bounds", LARGE, ids=str)
def test_the_same_within_larger_bounds(bounds: Bounds) -> None:
    check(bounds)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_is_found(mutation: str) -> None:
    reduced = mutation not in HIDDEN_BY_THE_REDUCTION
    found = explored(Bounds(mutations=frozenset([mutation]), frames=1, reduced=reduced))
    assert MUTATIONS[mutation] in found.fault, str(found)
    assert found.trace, "the way to it is told"


@pytest.mark.parametrize("faults", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_reduction_loses_no_end(faults: int) -> None:
    bounds = Bounds(frames=1, faults=faults)
    every_order, reduced = explored(bounds._replace(reduced=False)), explored(bounds)
    assert not every_order.fault and not reduced.fault
    assert every_order.ends == reduced.ends
    assert reduced.states < every_order.states


@pytest.mark.parametrize("faults", [2, 4, 8])
@pytest.mark.parametrize("ways", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_ways_with_many_faults(faults: int, ways: int) -> None:
    """From three deaths on a request may fail, but it ends, and nothing is left of it."""
    model = handover_model(Bounds(tokens=4, frames=3, faults=faults))
    for seed in range(ways):
        assert not (fault := walk(model, seed)), fault


def test_the_model_has_the_limits_of_the_product() -> None:
    assert candidates.MAX_TRANSFERS == MAX_TRANSFERS
    assert DEATH_LIMIT.events == MAX_DEATHS
