"""What the OpenAPI document says of ``/v1/responses`` is so."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from router.openai.responses.body_schema import OTHER_ITEMS
from router.openai.responses.items import SKIPPED_ITEMS
from tests.router.conftest import Start
from tests.router.fake_worker import speaks
from tests.router.http.api.test_chat import CALL, EOS
from tests.router.openai.responses import codex
from tests.router.openai.responses.streams import events_of
from tests.router.openapi.test_document import check


@pytest.mark.parametrize("body", [codex.body(), codex.LITE])
async def test_bodies_and_responses_of_codex(
    start: Start, tokenizer: Tokenizer, body: dict[str, Any]
) -> None:
    check("ResponsesBody", body)
    call = CALL.replace("weather", "exec_command").replace("city", "cmd")
    cluster = await start(speaks([*tokenizer.encode(f"Hm. {call}").ids, EOS]))
    reply = await cluster.client.post("/v1/responses", json={**body, "stream": False})
    check("ResponseObject", reply.json())
    events = events_of((await cluster.client.post("/v1/responses", json=body)).text)
    for event in (events[0], events[-1]):
        check("ResponseObject", event["response"])


def test_items_that_are_left_out_are_in_the_schema() -> None:
    assert set(OTHER_ITEMS) >= SKIPPED_ITEMS
