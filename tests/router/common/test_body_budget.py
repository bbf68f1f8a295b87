"""The bytes of bodies that are being read are bounded, for each tenant and for all."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request
from starlette.types import Message

from router.common.body_budget import BODIES, FREE_BYTES, TENANT_SHARE, BodyBudget
from router.common.errors import ApiError
from router.common.request_body import read_json_object
from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import outputs

LIMIT = 64 << 10
PLACES = BODIES // TENANT_SHARE  # bodies of the greatest size that a tenant may send at once


class Upload:
    """A client that sends a body of ``size`` bytes and ends it when it is told to."""

    def __init__(self, budget: BodyBudget, tenant: str, size: int = LIMIT) -> None:
        self.may_end = asyncio.Event()
        body = b'{"x": "' + bytes(b"x" * (size - 9)) + b'"}'
        self._parts = [body[at : at + 16_000] for at in range(0, len(body), 16_000)]
        self.task = asyncio.create_task(self._read(budget, tenant))

    async def _read(self, budget: BodyBudget, tenant: str) -> None:
        headers = [(b"content-type", b"application/json")]
        request = Request({"type": "http", "headers": headers}, self._receive)
        with budget.open(tenant) as claim:
            await read_json_object(request, LIMIT, 5.0, claim)

    async def _receive(self) -> Message:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": True}
        await self.may_end.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def status(self) -> int:
        self.may_end.set()
        try:
            await self.task
        except ApiError as error:
            assert error.headers["retry-after"] and error.headers["connection"] == "close"
            return error.status
        return 200


async def let_all_send() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_tenant_has_a_part_and_others_the_rest() -> None:
    budget = BodyBudget(LIMIT)
    held = [Upload(budget, "greedy") for _ in range(PLACES)]
    await let_all_send()
    assert budget.held == {"greedy": PLACES * LIMIT}
    beyond = Upload(budget, "greedy")
    small = Upload(budget, "greedy", FREE_BYTES)
    other = Upload(budget, "other")
    assert await beyond.status() == 429
    assert [await upload.status() for upload in (small, other)] == [200, 200]
    assert [await upload.status() for upload in held] == [200] * PLACES
    assert not budget.held and await Upload(budget, "greedy").status() == 200


async def test_all_tenants_together_have_a_bound() -> None:
    budget = BodyBudget(LIMIT)
    held = [Upload(budget, f"t{number}") for number in range(BODIES)]
    await let_all_send()
    assert await Upload(budget, "late").status() == 503
    held[0].task.cancel()  # the client has disconnected
    await asyncio.wait([held[0].task])
    assert await Upload(budget, "late").status() == 200
    assert [await upload.status() for upload in held[1:]] == [200] * (BODIES - 1)
    assert not budget.held


async def test_what_is_too_large_or_no_json_holds_nothing_afterwards() -> None:
    budget = BodyBudget(LIMIT)
    large = Upload(budget, "a", 2 * LIMIT)
    await let_all_send()
    assert not budget.held, "it is discarded while the rest comes"
    large.may_end.set()
    with pytest.raises(ApiError) as refused:
        await large.task
    assert refused.value.status == 413


async def test_at_the_api(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.common.body_budget.BODIES", 0)
    cluster = await start(outputs())
    large = json.dumps({"model": MODEL, "prompt": [40], "max_tokens": 1, "user": "x" * FREE_BYTES})
    typed = {"content-type": "application/json"}
    answer = await cluster.client.post("/v1/completions", content=large, headers=typed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert answer.headers["retry-after"] == "1"
    assert (await cluster.post(prompt=[40], max_tokens=1)).status_code == 200
    assert not cluster.app.state.router.bodies.held
