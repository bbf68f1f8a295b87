"""Parameters of chats on ``/v1/responses`` and ``/v1/messages``: taken, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from tokenizers import Tokenizer

from router.anthropic.body import MESSAGES_FIELDS
from router.openai.bodies.chat_body import ChatBody
from router.openai.responses.body import RESPONSES_FIELDS, OpenFields
from tests.router.conftest import MODEL, Cluster, Start
from tests.router.fake_worker import outputs, speaks

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi", "max_output_tokens": 90},
    "/v1/messages": {"messages": HI, "max_tokens": 90},
}
TAKEN: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "seed": 11,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 2.0,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": [80, 81],
    "allowed_token_ids": [70, 71],
    "logit_bias": {"70": 1},
    "structured_outputs": {"regex": "a+"},
}
REFUSED: dict[str, Any] = {
    "use_beam_search": True,
    "bad_words": ["x"],
    "logits_processors": ["x"],
    "best_of": 2,
    "n": 2,
    "echo": True,
    "logprobs": True,
    "prompt_logprobs": 1,
    "response_format": {"type": "json_object"},
    "max_completion_tokens": 2,
    "n_predict": 2,
    "reasoning_effort": "low",
    "return_token_ids": True,
    "chat_template": "x",
}


async def post(cluster: Cluster, path: str, **body: Any) -> Any:
    base = path.removesuffix("/count_tokens").removesuffix("/input_tokens")
    return await cluster.client.post(path, json={"model": MODEL, **BODIES[base], **body})


@pytest.mark.parametrize("path", BODIES)
async def test_what_chats_take_is_taken(start: Start, path: str) -> None:
    cluster = await start(outputs())
    said = await cluster.chat(max_tokens=90, **TAKEN)
    assert said.status_code == 200, said.text
    reply = await post(cluster, path, **TAKEN)
    assert reply.status_code == 200, reply.text
    assert "x-baton-ignored" not in reply.headers
    [of_chat, sampling] = [one.request.sampling for one in cluster.workers[0].requests]
    assert MessageToDict(sampling) == MessageToDict(of_chat)
    assert (sampling.seed, list(sampling.stop_token_ids)) == (11, [80, 81])


@pytest.mark.parametrize("path", [*BODIES, "/v1/responses/input_tokens"])
async def test_what_is_not_supported_is_refused_by_name(start: Start, path: str) -> None:
    cluster = await start(outputs())
    for field, value in REFUSED.items():
        reply = await post(cluster, path, **{field: value})
        assert reply.status_code == 400, field
        assert reply.json()["error"]["message"].startswith(f"{field} is not supported")
    assert (await post(cluster, path, **dict.fromkeys(REFUSED))).status_code == 200


@pytest.mark.parametrize("fields", [RESPONSES_FIELDS, MESSAGES_FIELDS])
def test_each_parameter_of_a_chat_is_known_once(fields: Any) -> None:
    parts = [set(fields.passed), set(fields.refused), set(fields.without_effect)]
    own = fields.known - set.union(*parts)
    assert sum(map(len, parts)) + len(own) == len(fields.known)
    assert ChatBody.model_fields.keys() <= fields.known
    assert fields.renamed.keys() <= fields.refused.keys()
    assert own == OpenFields.model_fields.keys() or "max_tokens" in own


async def test_refusals_name_the_field_to_use(start: Start) -> None:
    cluster = await start(outputs())
    formats = {"/v1/responses": "text.format", "/v1/messages": "output_config.format"}
    for path, name in formats.items():
        reply = await post(cluster, path, response_format={"type": "json_object"})
        assert f"(use {name})" in reply.json()["error"]["message"]
    for path, name in (("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")):
        reply = await post(cluster, path, min_tokens=500)
        message = "min_tokens must be at most {} (90), not 500"
        assert reply.json()["error"]["message"] == message.format(name)


async def test_a_budget_by_its_name_in_chats(start: Start) -> None:
    cluster = await start(outputs(), reasoning_parser="qwen3")
    for path in BODIES:
        reply = await post(cluster, path, thinking_token_budget=5)
        assert reply.status_code == 400, "this model's end of the reasoning is not one token"
        assert reply.json()["error"]["message"].startswith("thinking_token_budget is not supp")


@pytest.mark.parametrize("path", BODIES)
async def test_reasoning_can_be_left_out(start: Start, tokenizer: Tokenizer, path: str) -> None:
    ids = tokenizer.encode("<think>hm</think>Hello.").ids
    cluster = await start(speaks([*ids, 0]), reasoning_parser="qwen3")
    for shown in (True, False):
        reply = await post(cluster, path, include_reasoning=shown)
        [*reasoning, _] = reply.json()["output" if path == "/v1/responses" else "content"]
        assert bool(reasoning) == shown


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
async def test_a_count_is_not_cut(start: Start, path: str) -> None:
    cluster = await start(outputs())
    reply = await post(cluster, path, truncate_prompt_tokens=2)
    assert reply.status_code == 400
    assert "truncate_prompt_tokens" in reply.json()["error"]["message"]
