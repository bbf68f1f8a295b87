"""Ray Serve's policy in the place of Baton's."""

from __future__ import annotations

import time

import pytest

from bench.autoscale_ray import OngoingRequests, Wanted
from cluster.settings import Role
from cluster.sizing.snapshot import Counts, Goals, Limits, Snapshot, Worker

PAIR: tuple[Role, Role] = ("prefill", "decode")


def snapshot(prefill: int, decode: int, gpus: float | None = None) -> Snapshot:
    there = [PAIR[0]] * prefill + [PAIR[1]] * decode
    return Snapshot(
        at_s=0.0,
        mix=None,
        goals=Goals(ttft_s=2.0, tpot_s=0.1),
        machines={},
        workers=tuple(Worker(instance=str(i), home=r, role=r) for i, r in enumerate(there)),
        targets=Counts(prefill=prefill, decode=decode),
        limits=Limits(
            least=Counts(prefill=1, decode=1), most=Counts(prefill=6, decode=6), gpus=gpus
        ),
    )


def after(policy: OngoingRequests, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: now + seconds)


def test_it_asks_for_as_many_as_the_ongoing_requests_want_after_its_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = OngoingRequests(Wanted(2.0, 10.0), quicker=10.0)
    policy.note(0.0, {"prefill": 8, "decode": 5})
    assert policy(snapshot(1, 1)).targets == Counts(prefill=1, decode=1)
    after(policy, 3.1, monkeypatch)
    assert policy(snapshot(1, 1)).targets == Counts(prefill=4, decode=1)


def test_it_goes_down_later_and_within_limits_and_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = OngoingRequests(Wanted(2.0, 10.0), quicker=10.0)
    policy.note(0.0, {"prefill": 80, "decode": 5})
    policy(snapshot(1, 4, gpus=8))
    after(policy, 3.1, monkeypatch)
    assert policy(snapshot(1, 4, gpus=8)).targets == Counts(prefill=4, decode=4)
    after(policy, 61.0, monkeypatch)
    assert policy(snapshot(6, 4)).targets == Counts(prefill=6, decode=1)


def test_what_lies_before_its_look_back_does_not_count() -> None:
    policy = OngoingRequests(Wanted(2.0, 10.0), quicker=10.0)
    policy.note(0.0, {"prefill": 100, "decode": 100})
    policy.note(4.0, {"prefill": 2, "decode": 4})
    policy.note(5.0, {"prefill": 4, "decode": 8})
    assert policy(snapshot(1, 1)).text == "ongoing: 3.0, 6.0"
