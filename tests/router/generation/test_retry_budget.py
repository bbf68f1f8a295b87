"""What counts against a request when it is tried again, and how long workers may compute it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from protocol.liveness import SilenceDetector
from protocol.retry_budget import HAND_BACK_LIMIT, RetryLimit
from protocol.wire import wire_pb2 as pb
from router.generation import choice_stream, submission
from tests.router.conftest import Start, until
from tests.router.fake_worker import expected, outputs, silent


async def test_streams_cut_by_the_routers_own_pause_are_no_deaths(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pause cut every stream, and the third one ended every request in flight."""
    monkeypatch.setattr(SilenceDetector, "after_own_pause", lambda self: True, raising=False)
    cluster = await start(outputs(die_after=3))
    [worker] = cluster.workers
    response = await cluster.post(prompt=[5, 6, 7], max_tokens=14, return_token_ids=True)
    assert response.json()["choices"][0]["token_ids"] == expected([5, 6, 7], 14)
    assert [submit.deaths for submit in worker.requests] == [0] * 5


async def test_pauses_have_a_budget_of_their_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SilenceDetector, "after_own_pause", lambda self: True)
    monkeypatch.setattr(choice_stream, "HAND_BACK_LIMIT", RetryLimit(4, 60.0))
    assert HAND_BACK_LIMIT.events > 4
    cluster = await start(outputs(die_after=0))
    assert (await cluster.post(prompt=[5, 6, 7], max_tokens=14)).status_code == 503
    assert len(cluster.workers[0].requests) == 4


async def test_a_stream_that_breaks_without_a_pause_is_a_death(start: Start) -> None:
    """A poison request that kills whatever computes it ends after three workers."""
    cluster = await start(outputs(die_after=0))
    assert (await cluster.post(prompt=[5, 6, 7], max_tokens=14)).status_code == 503
    assert [submit.deaths for submit in cluster.workers[0].requests] == [0, 1, 2]


async def test_deaths_that_lie_apart_end_no_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "DEATH_LIMIT", RetryLimit(3, 0.01), raising=False)
    cluster = await start(outputs(error_after=2, delay=0.01))
    response = await cluster.post(prompt=[5, 6, 7], max_tokens=13, return_token_ids=True)
    assert response.json()["choices"][0]["token_ids"] == expected([5, 6, 7], 13)
    assert len(cluster.workers[0].requests) == 7


async def test_each_submission_says_how_long_its_client_waits(start: Start) -> None:
    cluster = await start(
        outputs(error_after=2, delay=0.01), first_token_timeout_s=30.0, next_token_timeout_s=80.0
    )
    await cluster.post(prompt=[5, 6, 7], max_tokens=4)
    first, again = (submit.request for submit in cluster.workers[0].requests)
    assert 29 < first.first_token_s < 31
    assert 79 < again.first_token_s < 81, "the client waits for the next token"
    assert 80 < first.token_timeout_s == again.token_timeout_s < 81


async def test_a_worker_that_says_expired_ends_the_request_as_the_routers_timer_does(
    start: Start,
) -> None:
    async def expire(request: pb.Request) -> AsyncIterator[pb.Output]:
        yield pb.Output(
            id=request.id, finish=pb.FINISH_ERROR, error="did not come in time", expired=True
        )

    cluster = await start(expire)
    response = await cluster.post(prompt=[5, 6, 7])
    assert response.status_code == 504 and "in time" in response.json()["error"]["message"]


async def test_the_routers_own_timer_is_first(start: Start) -> None:
    cluster = await start(silent, first_token_timeout_s=0.05)
    response = await cluster.post(prompt=[5, 6, 7])
    assert response.status_code == 504 and "0.05 s" in response.json()["error"]["message"]
    [worker] = cluster.workers
    await until(lambda: bool(worker.cancelled))
    assert worker.requests[0].request.first_token_s > 0.5


class Sink:
    """Notes whether the loss of its link is nobody's fault."""

    def __init__(self) -> None:
        self.is_blameless: bool | None = None

    def on_output(self, output: pb.Output) -> bool:
        return True

    def on_link_lost(self, reason: str, *, own_pause: bool) -> None:
        self.is_blameless = own_pause


async def test_a_request_that_was_never_written_has_killed_nobody(start: Start) -> None:
    """The worker dies while submits wait for it: they once counted a death each."""
    cluster = await start(silent)
    [link] = cluster.app.state.router.pool.links.values()
    written, waiting = Sink(), Sink()
    link.submit(pb.Submit(request=pb.Request(id="written", prompt=[1])), written)
    link._next_message()
    link.submit(pb.Submit(request=pb.Request(id="waiting", prompt=[1])), waiting)
    link._detach("it died")
    assert (written.is_blameless, waiting.is_blameless) == (False, True)
