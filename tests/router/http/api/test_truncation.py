"""Prompts that are cut to their end, and special tokens around chats."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Start
from tests.router.fake_worker import outputs
from tests.router.http.api.test_errors_completions import UNSUPPORTED

LONG = "x y " * 5000  # more than the model takes


async def test_a_prompt_is_cut_to_what_fits(start: Start) -> None:
    cluster = await start(outputs())
    for prompt in (LONG, [5] * 5000):
        reply = await cluster.post(prompt=prompt, truncate_prompt_tokens=-1, max_tokens=6)
        usage = reply.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4090, 6)
    reply = await cluster.post(prompt=[5, 6], truncate_prompt_tokens=-1, max_tokens=1)
    assert reply.json()["usage"]["prompt_tokens"] == 2
    reply = await cluster.post(prompt=LONG, truncate_prompt_tokens=-1, max_tokens=4096)
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("kept", "left"), [(-1, 4090), (100, 100), (4090, 4090)])
async def test_a_chat_is_cut_to_its_end(start: Start, kept: int, left: int) -> None:
    cluster = await start(outputs())
    asked: dict[str, Any] = {"truncate_prompt_tokens": kept, "max_tokens": 6}
    usage = (await cluster.chat(LONG, **asked)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (left, 6)
    sent = list(cluster.workers[0].requests[0].request.prompt)
    messages = [{"role": "user", "content": LONG}]
    whole = (await cluster.client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    assert sent == whole[-left:]


async def test_what_is_refused(start: Start) -> None:
    cluster = await start(outputs())
    for wrong, says in ((0, "at least 1, not 0"), (-2, "at least -1"), ("1", "an integer")):
        error = (await cluster.chat(truncate_prompt_tokens=wrong)).json()["error"]
        assert error["param"] == "truncate_prompt_tokens" and says in error["message"]
    reply = await cluster.chat(LONG, truncate_prompt_tokens=4096, max_tokens=6)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    body = {"messages": [{"role": "user", "content": "hi"}], "truncate_prompt_tokens": 1}
    error = (await cluster.client.post("/tokenize", json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", UNSUPPORTED)


async def test_special_tokens_are_asked_for_in_chats(start: Start) -> None:
    cluster = await start(outputs())
    plain = (await cluster.chat(max_tokens=1, return_token_ids=True)).json()
    for special in (True, False):
        asked: dict[str, Any] = {"add_special_tokens": special, "max_tokens": 1}
        reply = await cluster.chat(**asked, return_token_ids=True)
        assert reply.status_code == 200, reply.text
        # The model of these tests has a tokenizer that adds none.
        assert reply.json()["prompt_token_ids"] == plain["prompt_token_ids"]
