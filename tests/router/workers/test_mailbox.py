from __future__ import annotations

import asyncio

import pytest

from protocol.requests import Finish, Logprobs
from protocol.wire import wire_pb2 as pb
from router.workers.mailbox import Flight, Mailbox, Trouble, deliver


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


def _one(logprob: float) -> Logprobs:
    return Logprobs(logprob, 1, [], [])


async def test_log_probabilities_stay_beside_their_tokens() -> None:
    box = Mailbox(3)
    box.put([1], Finish.NONE, [_one(-1.0)])
    box.put([2, 3], Finish.NONE, [_one(-2.0), _one(-3.0)])
    assert not box.put([4], Finish.NONE, [_one(-4.0)])
    batch = await box.take()
    assert [report.logprob for report in batch.logprobs] == [-1.0, -2.0, -3.0]
    box.put([5], Finish.NONE, [_one(-5.0)])
    assert (await box.take()).logprobs == [_one(-5.0)]


def _output(*, logprobs: int = 0, prompt: int = 0, tops: int = 0) -> pb.Output:
    report = pb.Logprobs(logprob=-1.0, rank=1, top_tokens=[7] * tops, top_logprobs=[-1.0] * tops)
    return pb.Output(
        id="x", tokens=[1], logprobs=[report] * logprobs, prompt_logprobs=[report] * prompt
    )


def _flight(box: Mailbox, *, emitted: int = 0) -> Flight:
    asked = pb.Sampling(logprobs=2, prompt_logprobs=2)
    return Flight.of(pb.Request(prompt=[1, 2, 3], emitted=[1] * emitted, sampling=asked), box)


async def test_log_probabilities_that_were_asked_for_are_handed_on() -> None:
    box = Mailbox(8)
    assert deliver(_output(logprobs=1, prompt=2, tops=2), _flight(box))
    assert len((await box.take()).logprobs) == 1
    assert [report.top_tokens for report in box.prompt_logprobs] == [[7, 7], [7, 7]]
    assert deliver(_output(logprobs=1), _flight(box, emitted=1))
    assert len(box.prompt_logprobs) == 2, "a resumed request keeps what it has"


@pytest.mark.parametrize(
    ("output", "emitted"),
    [
        (_output(), 0),
        (_output(logprobs=2), 0),
        (_output(logprobs=1, prompt=1), 0),
        (_output(logprobs=1, prompt=3), 0),
        (_output(logprobs=1, prompt=2), 1),
        (_output(logprobs=1, tops=21), 0),
    ],
)
async def test_log_probabilities_that_were_not_due_are_a_fault(
    output: pb.Output, emitted: int
) -> None:
    box = Mailbox(8)
    assert not deliver(output, _flight(box, emitted=emitted))
    batch = await box.take()
    assert (batch.trouble, batch.tokens) == (Trouble.RETRYABLE, [])


async def test_a_wrong_request_keeps_its_field() -> None:
    box = Mailbox(8)
    invalid = pb.Invalid(param="prompt", code="context_length_exceeded")
    output = pb.Output(id="x", finish=pb.FINISH_ERROR, error="too long", invalid=invalid)
    assert deliver(output, _flight(box))
    batch = await box.take()
    assert (batch.trouble, batch.reason) == (Trouble.INVALID, "too long")
    assert batch.invalid is not None
    assert (batch.invalid.param, batch.invalid.code) == ("prompt", "context_length_exceeded")
    assert box.lost
