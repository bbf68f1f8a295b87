from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protocol.requests import Finish, Logprobs, Request
from protocol.sampling_params import MAX_OUTPUT_LOGPROBS, SamplingParams
from protocol.wire import wire_pb2 as pb
from router.generation.submission import Interruption, Submission, TokenQueue
from router.placement.cost import PrefillTerms
from router.placement.estimates import RoutingEstimates


async def test_tokens_that_arrived_meanwhile_are_taken_at_once() -> None:
    queue = TokenQueue(10)
    queue.put([1], Finish.NONE)
    queue.put([2, 3], Finish.STOP)
    batch = await queue.take()
    assert (batch.tokens, batch.finish) == ([1, 2, 3], Finish.STOP)


async def test_put_wakes_the_waiting_task() -> None:
    queue = TokenQueue(10)
    taker = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taker.done()
    queue.put([1], Finish.NONE)
    assert (await taker).tokens == [1]


async def test_full_queue_refuses_and_keeps_what_it_had() -> None:
    queue = TokenQueue(3)
    assert queue.put([1, 2], Finish.NONE)
    assert not queue.put([3, 4], Finish.STOP)
    batch = await queue.take()
    assert (batch.tokens, batch.finish) == ([1, 2], Finish.NONE)
    assert queue.put([5, 6, 7, 8], Finish.NONE), "a message always fits into an empty queue"


async def test_final_interruption_is_not_replaced() -> None:
    queue = TokenQueue(3)
    queue.interrupt(Interruption.LINK_LOST, "x")
    assert (await queue.take()).interruption is Interruption.LINK_LOST
    queue.interrupt(Interruption.DISCONNECTED, "y")
    queue.interrupt(Interruption.LINK_LOST, "z")
    for _ in range(2):
        batch = await queue.take()
        assert (batch.interruption, batch.reason) == (Interruption.DISCONNECTED, "y")


def _logprobs(logprob: float) -> Logprobs:
    return Logprobs(logprob, 1, [], [])


async def test_logprobs_stay_beside_their_tokens() -> None:
    queue = TokenQueue(3)
    queue.put([1], Finish.NONE, [_logprobs(-1.0)])
    queue.put([2, 3], Finish.NONE, [_logprobs(-2.0), _logprobs(-3.0)])
    assert not queue.put([4], Finish.NONE, [_logprobs(-4.0)])
    batch = await queue.take()
    assert [report.logprob for report in batch.logprobs] == [-1.0, -2.0, -3.0]
    queue.put([5], Finish.NONE, [_logprobs(-5.0)])
    assert (await queue.take()).logprobs == [_logprobs(-5.0)]


def _output(*, logprobs: int = 0, prompt: int = 0, tops: int = 0) -> pb.Output:
    report = pb.Logprobs(logprob=-1.0, rank=1, top_tokens=[7] * tops, top_logprobs=[-1.0] * tops)
    return pb.Output(
        id="x", tokens=[1], logprobs=[report] * logprobs, prompt_logprobs=[report] * prompt
    )


def _submission(queue: TokenQueue, *, emitted: int = 0) -> Submission:
    """A submission whose link and ledger do nothing."""
    placer: Any = SimpleNamespace(
        estimates=None,
        submit_message=lambda placed, request: pb.Submit(),
        open_ticket=lambda placed, request_id: None,
    )
    placed: Any = SimpleNamespace(link=SimpleNamespace(submit=lambda message, sink: None))
    sampling = SamplingParams(logprobs=2, prompt_logprobs=2)
    request = Request(id="x", prompt=(1, 2, 3), emitted=(1,) * emitted, sampling=sampling)
    return Submission(placer, placed, request, queue)


async def test_requested_logprobs_are_handed_on() -> None:
    queue = TokenQueue(8)
    assert _submission(queue).on_output(_output(logprobs=1, prompt=2, tops=2))
    assert len((await queue.take()).logprobs) == 1
    assert [report.top_tokens for report in queue.prompt_logprobs] == [[7, 7], [7, 7]]
    assert _submission(queue, emitted=1).on_output(_output(logprobs=1))
    assert len(queue.prompt_logprobs) == 2, "a resumed request keeps what it has"


@pytest.mark.parametrize(
    ("output", "emitted"),
    [
        (_output(), 0),
        (_output(logprobs=2), 0),
        (_output(logprobs=1, prompt=1), 0),
        (_output(logprobs=1, prompt=3), 0),
        (_output(logprobs=1, prompt=2), 1),
        (_output(logprobs=1, tops=MAX_OUTPUT_LOGPROBS + 1), 0),
    ],
)
async def test_wrong_number_of_logprobs_interrupts_the_queue(
    output: pb.Output, emitted: int
) -> None:
    queue = TokenQueue(8)
    assert not _submission(queue, emitted=emitted).on_output(output)
    batch = await queue.take()
    assert (batch.interruption, batch.tokens) == (Interruption.RETRYABLE, [])


async def test_invalid_request_keeps_the_name_of_its_field() -> None:
    queue = TokenQueue(8)
    invalid = pb.Invalid(param="prompt", code="context_length_exceeded")
    output = pb.Output(id="x", finish=pb.FINISH_ERROR, error="too long", invalid=invalid)
    assert _submission(queue).on_output(output)
    batch = await queue.take()
    assert (batch.interruption, batch.reason) == (Interruption.INVALID, "too long")
    assert batch.invalid is not None
    assert (batch.invalid.param, batch.invalid.code) == ("prompt", "context_length_exceeded")
    assert queue.failed


def test_way_of_a_first_token_is_learned_apart_from_queue_and_prefill() -> None:
    """Of 0.5 s after its submission, 0.2 s passed between its events at the worker."""
    estimates = RoutingEstimates()
    p = PrefillTerms("p", 0, None, 0.0, 0.1, 0.1, 1.0, 1, 0.0)
    chosen = SimpleNamespace(p=p, prefill="p", decode="d")
    submission = _submission(TokenQueue(8))
    submission._estimates = estimates
    submission.placed = cast(
        Any, SimpleNamespace(choice=SimpleNamespace(chosen=chosen), neighbours=2)
    )
    for _ in range(200):
        submission.timeline = {"prefill_queued": 0.05, "first_token": 0.25}
        submission._learn_from_first_token(0.5)
    assert estimates.network({}).path_s["p", "d"] == pytest.approx(0.3, rel=0.01)
    assert estimates.correction("p", 2) == pytest.approx(2.0, rel=0.01)
    for _ in range(200):
        submission.timeline = {}
        submission._learn_from_first_token(0.1)
    assert estimates.network({}).path_s["p", "d"] == pytest.approx(0.3, rel=0.01)
    assert estimates.correction("p", 2) == pytest.approx(1.0, rel=0.01)


def test_transfers_are_learned_of_the_workers_that_were_named() -> None:
    estimates = RoutingEstimates()
    submission = _submission(TokenQueue(8))
    submission._estimates = estimates
    chosen, other = (SimpleNamespace(prefill=name, decode="d") for name in ("p", "q"))
    choice = SimpleNamespace(chosen=chosen, others=[other])
    submission.placed = cast(Any, SimpleNamespace(choice=choice))
    for name in ("p", "q", "made up"):
        submission.measured = pb.Measured(prefill_instance=name, tail_bytes=500, tail_seconds=0.5)
        submission.record_finish()
    assert estimates.network({}).bandwidth.keys() == {("p", "d"), ("q", "d")}


async def test_events_that_come_with_the_first_token_are_kept() -> None:
    submission = _submission(TokenQueue(8))
    first = _output(logprobs=1, prompt=2)
    first.timeline.add(event="prefill_queued", seconds=0.1)
    assert submission.on_output(first)
    assert submission.timeline == {"prefill_queued": 0.1}
    assert submission.on_output(_output(logprobs=1))
    assert submission.timeline == {"prefill_queued": 0.1}
