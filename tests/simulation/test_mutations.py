"""The simulator finds known defects when they are put back into the product.

Each defect has been in Baton. ``seeds`` bounds the search; a mutation that is found later than that
has become hard to find, and the profile that stresses it needs more of what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import pytest

from kvtransfer.credits import CreditWindow
from protocol.liveness import SilenceDetector
from protocol.requests import Request
from router.workers.outbox import Outbox
from tests.simulation.profiles import (
    DEATHS,
    HANG_UPS,
    PREFILL_QUEUES,
    ROUTER_PAUSES,
    Profile,
    seeds_of,
)
from tests.simulation.runner import Simulation

pytestmark = pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")


class Mutation(NamedTuple):
    """A defect: ``method`` replaces ``owner.name``, and some seed then says ``finding``."""

    owner: type
    name: str
    method: Callable[..., Any]
    profile: Profile
    seeds: int
    finding: str


def cancel_before_its_submit(outbox: Outbox, request_id: str) -> None:
    outbox._cancels.append(request_id)  # although the submit may still wait behind others


def every_loss_is_a_death(silence: SilenceDetector) -> bool:
    return False  # also after this process itself stood still


def stalled_since_the_credit(window: CreditWindow) -> float:
    return window._since_progress() if window.held else 0.0  # whether or not a frame is due


def resumed_as_new(request: Request, emitted: Iterable[int], waited_s: float = 0.0) -> Request:
    return msgspec.structs.replace(request, emitted=tuple(emitted), waited_s=0.0)


MUTATIONS = {
    "a cancel overtakes its submit": Mutation(
        Outbox, "cancel", cancel_before_its_submit, HANG_UPS, 60, "its router has given up"
    ),
    "own pauses count as deaths": Mutation(
        SilenceDetector, "after_own_pause", every_loss_is_a_death, ROUTER_PAUSES, 30, "0 faults"
    ),
    "a link times out before a frame is due": Mutation(
        CreditWindow, "stalled_s", stalled_since_the_credit, PREFILL_QUEUES, 40, "blames its link"
    ),
    "an attempt loses its place": Mutation(
        Request, "resumed", resumed_as_new, DEATHS, 30, "of its age"
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_defect_that_is_put_back_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.method)
    simulation = Simulation()
    with simulation.patched():
        for seed in seeds_of(mutation.profile, mutation.seeds):
            if any(mutation.finding in text for text in simulation.run(seed).violations):
                return
    pytest.fail(f"none of {mutation.seeds} seeds found it")
