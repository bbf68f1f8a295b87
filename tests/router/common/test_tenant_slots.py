"""Turns of tenants at work of which only little may run at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.common.errors import ApiError
from router.common.tenant_slots import MAX_WAITING, TenantSlots
from router.common.work_lane import WorkClaim, WorkLane


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Requests:
    """Requests that wait for a slot; ``entered`` names their tenants in order."""

    def __init__(self, slots: TenantSlots) -> None:
        self.slots = slots
        self.entered: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, tenants: str) -> None:
        self.tasks += [asyncio.create_task(self._enter(tenant)) for tenant in tenants]
        await settle()

    async def _enter(self, tenant: str) -> None:
        await self.slots.enter(tenant, 5.0)
        self.entered.append(tenant)

    async def leave(self, tenant: str) -> None:
        self.slots.leave(tenant)
        await settle()


async def test_each_tenant_has_one_at_once_and_others_go_first() -> None:
    requests = Requests(TenantSlots(2))
    await requests.send("aabcc")
    assert requests.entered == ["a", "b"]
    await requests.leave("b")
    assert requests.entered == ["a", "b", "c"]
    requests.tasks[1].cancel()  # the second a
    await settle()
    await requests.leave("a")
    with pytest.raises(TimeoutError):
        await requests.slots.enter("c", 0.01)
    await requests.leave("c")
    assert requests.entered == ["a", "b", "c", "c"]


async def test_a_backlog_of_one_tenant_delays_another_by_one_turn() -> None:
    requests = Requests(TenantSlots(1))
    await requests.send("a" * 20 + "b" * 2 + "c")
    for tenant in "aabcab":
        await requests.leave(tenant)
    assert "".join(requests.entered[:6]) == "aabcab"


async def test_a_tenant_alone_gets_all_slots_but_one() -> None:
    requests = Requests(TenantSlots(4, per_tenant=3))
    await requests.send("aaaaa")
    assert requests.entered == ["a"] * 3
    await requests.send("b")
    assert requests.entered == ["a"] * 3 + ["b"], "a slot is always left for another tenant"
    await requests.leave("a")
    assert requests.entered == ["a"] * 3 + ["b", "a"]


async def test_what_waits_is_bounded_for_each_tenant() -> None:
    requests = Requests(TenantSlots(1))
    await requests.send("a" * (MAX_WAITING + 1))
    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        await requests.slots.enter("a", 60.0)
    assert time.perf_counter() - start < 1.0
    await requests.send("b")
    await requests.leave("a")
    await requests.leave("a")
    assert requests.entered == ["a", "a", "b"]
    for task in requests.tasks:
        task.cancel()
    await settle()


async def test_a_request_that_leaves_as_its_turn_comes_gives_it_on() -> None:
    requests = Requests(TenantSlots(1))
    await requests.send("abc")
    requests.slots.leave("a")  # the turn is b's, which has not run since
    requests.tasks[1].cancel()
    await settle()
    assert requests.entered == ["a", "c"]


async def test_a_lane_refuses_what_is_due_and_keeps_its_slot_while_work_runs() -> None:
    lane = WorkLane("test", 1, 1)
    try:
        slow = asyncio.create_task(
            lane.run(
                WorkClaim("a", time.perf_counter() + 0.02), "prompt", lambda _: time.sleep(0.2)
            )
        )
        await asyncio.sleep(0.01)
        late = WorkClaim("b", time.perf_counter() + 0.05)
        for task in (slow, asyncio.create_task(lane.run(late, "messages", lambda _: None))):
            with pytest.raises(ApiError) as error:
                await task
            assert error.value.status == 429 and error.value.headers["retry-after"]
        assert "messages could not be tokenized" in error.value.message
        soon = WorkClaim("b", time.perf_counter() + 10)
        left_s = await lane.run(soon, "messages", lambda seconds: seconds)
        assert 5 < left_s < 10, "it began when the slow one had ended"
        with pytest.raises(ApiError, match="prompt"):
            await lane.run(WorkClaim("b", time.perf_counter() - 1), "prompt", lambda _: None)
        with pytest.raises(ZeroDivisionError):
            await lane.run(soon, "prompt", lambda _: 1 / 0)
    finally:
        lane.close()
