"""The choices of one HTTP request are let in together, or none of them is."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.requests import Request
from router.common.errors import ApiError, overloaded
from router.common.request_body import ClientDisconnected
from router.generation.choice_stream import ChoiceStream, GenerationRequest
from router.generation.choice_text import OutputOptions
from router.generation.choice_turn import ChoiceTurn, RequestEntry
from router.generation.output_text import SharedPromptLogprobs
from router.http.response import GenerationResponse
from router.placement.admission import AdmissionLimits
from router.placement.cost import Placement
from router.placement.snapshot import RequestOrigin
from router.tenants.tenant import Tenant
from tests.router.conftest import Start
from tests.router.fairness.test_dispatcher import BUSY, FREE, Router
from tests.router.fairness.works import placement
from tests.router.fake_worker import silent

TTFT_S = 20.0


class Choices:
    """The turns of one HTTP request; each goes where ``now`` says."""

    def __init__(self, router: Router, *now: Placement) -> None:
        self.now = list(now)
        self.submitted: list[int] = []
        self.refused: list[tuple[int, ApiError]] = []
        self._router = router
        self._entry = RequestEntry(AdmissionLimits(TTFT_S))
        self.turns = [self._turn(index) for index in range(len(now))]

    def _turn(self, index: int) -> ChoiceTurn:
        def place(*_: object, **__: object) -> Any:
            query = SimpleNamespace(tokens=100, output=10)
            chosen = self.now[index]
            choice = SimpleNamespace(chosen=chosen)
            return SimpleNamespace(choice=choice, query=query, batched_s=chosen.p.queue_s)

        request = Request(id=str(index), prompt=(1,))
        placer: Any = SimpleNamespace(place=place)
        return ChoiceTurn(
            *(self._router.dispatcher, placer, request, [], Tenant("a"), RequestOrigin("a")),
            lambda placed, older_s: self.submitted.append(index),
            lambda error: self.refused.append((index, error)),
        )

    def enter(self) -> None:
        arrived = self._router.clock.now
        for turn in self.turns:
            turn.enter(arrived, self._entry)


def test_later_choices_of_an_accepted_request_do_not_expire() -> None:
    router = Router()
    choices = Choices(router, FREE, *[BUSY] * 15)
    choices.enter()
    assert choices.submitted == [0]
    router.wait(2 * TTFT_S)
    assert not choices.refused, "the first one is being streamed"
    choices.now = [FREE] * 16
    router.wait(1.0)
    assert choices.submitted == list(range(16))
    assert not router.refusals


def test_later_choices_of_an_accepted_request_are_not_refused_at_entry() -> None:
    router = Router()
    choices = Choices(router, FREE, placement(queue_s=50.0))
    choices.enter()
    assert choices.submitted == [0] and router.queue.length == 1


def test_the_first_choice_does_not_expire_once_another_has_been_dispatched() -> None:
    router = Router()
    choices = Choices(router, BUSY, placement("idle"))
    choices.enter()
    router.wait(1.0)
    assert choices.submitted == [1]
    router.wait(2 * TTFT_S)
    assert not choices.refused
    choices.now[0] = FREE
    router.wait(1.0)
    assert choices.submitted == [1, 0]


def test_a_request_that_waits_in_vain_is_refused_before_any_choice_is_dispatched() -> None:
    router = Router()
    choices = Choices(router, BUSY, BUSY, BUSY)
    choices.enter()
    router.wait(2 * TTFT_S)
    [(index, error)] = choices.refused
    assert (index, error.status) == (0, 429) and not choices.submitted
    with pytest.raises(ApiError):
        Choices(Router(), placement(queue_s=50.0), FREE).enter()


async def test_no_choice_starts_where_there_is_no_place_for_all() -> None:
    started: list[int] = []

    class Choice:
        def __init__(self, index: int) -> None:
            self.index = index

        def reserve(self) -> None:
            if self.index == 2:
                raise overloaded("full", 1.0)

        def start(self) -> None:
            self.reserve()
            started.append(self.index)

    response: Any = SimpleNamespace(_choices=[Choice(index) for index in range(3)])
    with pytest.raises(ApiError):
        await GenerationResponse._start_choices(response)
    assert not started


async def test_no_choice_starts_once_the_client_has_hung_up(start: Start) -> None:
    """All choices of a client that was gone were once submitted, and charged to its tenant."""
    cluster = await start(silent)
    services = cluster.app.state.router.routing_services
    request, entry = Request(id="x", prompt=(1, 2, 3)), RequestEntry(AdmissionLimits(TTFT_S))
    generation = GenerationRequest(request, [], time.perf_counter(), entry)
    choices = [
        ChoiceStream(services, index, generation, OutputOptions(), SharedPromptLogprobs())
        for index in range(3)
    ]
    response: Any = SimpleNamespace(_choices=choices)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    watcher = asyncio.create_task(GenerationResponse._watch_disconnect(response, receive))
    await GenerationResponse._start_choices(response)
    await watcher
    assert [len(choice.submissions) for choice in choices] == [1, 0, 0]
    for choice in choices:
        with pytest.raises(ClientDisconnected):
            await choice.next_delta()
        choice.close("cancelled")
    assert services.dispatcher.counters.value(generation.tenant.name) == len(request.prompt)
    assert not services.admission.inside
