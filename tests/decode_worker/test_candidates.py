"""Which prefill worker is asked after a failed hand-over."""

from __future__ import annotations

import pytest

from decode_worker.candidates import MAX_TRANSFERS, PrefillCandidates
from protocol.errors import CarrierFailed, NoPages, PeerLost, PeerRefused, TransferFailed
from protocol.wire import wire_pb2 as pb

FIRST, SECOND = (pb.PrefillCandidate(instance=name, endpoint=f"{name}:1") for name in "pq")


def always(candidate: pb.PrefillCandidate) -> bool:
    return True


@pytest.mark.parametrize("error", [CarrierFailed("x"), NoPages("x"), TransferFailed("x")])
def test_same_worker_is_asked_again_while_it_lives(error: TransferFailed) -> None:
    candidates = PrefillCandidates([FIRST, SECOND])
    for _ in range(MAX_TRANSFERS):
        assert candidates.choose(always) is FIRST
        candidates.failed(FIRST, error)
    assert candidates.choose(always) is None  # enough: the prompt is prefilled here


@pytest.mark.parametrize(
    "error", [PeerLost("x", at_work=True), PeerLost("x", at_work=False), PeerRefused("x")]
)
def test_worker_that_died_or_refuses_is_struck_off(error: TransferFailed) -> None:
    candidates = PrefillCandidates([FIRST, SECOND])
    candidates.failed(FIRST, error)
    assert candidates.choose(always) is SECOND
    candidates.failed(SECOND, error)
    assert candidates.choose(always) is None


def test_worker_that_no_link_leads_to_is_passed_over_and_not_struck_off() -> None:
    candidates = PrefillCandidates([FIRST, SECOND])
    assert candidates.choose(lambda c: c is not FIRST) is SECOND
    assert candidates.choose(lambda c: False) is None
    assert candidates.choose(always) is FIRST


def test_equal_candidates_are_struck_off_one_at_a_time() -> None:
    candidates = PrefillCandidates([FIRST, FIRST, SECOND, SECOND])
    candidates.failed(FIRST, PeerRefused("x"))
    candidates.failed(None, TransferFailed("x"))  # no worker was asked
    assert candidates.choose(lambda c: c is not FIRST) is SECOND
