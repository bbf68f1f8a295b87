from __future__ import annotations

import asyncio

from protocol.request import Finish
from router.mailbox import Mailbox, Trouble


async def test_what_came_meanwhile_is_taken_at_once() -> None:
    box = Mailbox(10)
    box.put([1], Finish.NONE)
    box.put([2, 3], Finish.STOP)
    batch = await box.take()
    assert (batch.tokens, batch.finish) == ([1, 2, 3], Finish.STOP)


async def test_the_taker_is_woken() -> None:
    box = Mailbox(10)
    taker = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not taker.done()
    box.put([1], Finish.NONE)
    assert (await taker).tokens == [1]


async def test_a_full_box_refuses_and_keeps_what_it_had() -> None:
    box = Mailbox(3)
    assert box.put([1, 2], Finish.NONE)
    assert not box.put([3, 4], Finish.STOP)
    batch = await box.take()
    assert (batch.tokens, batch.finish) == ([1, 2], Finish.NONE)
    assert box.put([5, 6, 7, 8], Finish.NONE), "one message alone always fits"


async def test_what_cannot_be_mended_stands() -> None:
    box = Mailbox(3)
    box.fail(Trouble.BROKEN, "x")
    assert (await box.take()).trouble is Trouble.BROKEN
    box.fail(Trouble.GONE, "y")
    box.fail(Trouble.BROKEN, "z")
    for _ in range(2):
        batch = await box.take()
        assert (batch.trouble, batch.reason) == (Trouble.GONE, "y")
