from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from router.openai.bodies.tokenize_body import MAX_TOKEN_STRINGS
from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import outputs

HI = [{"role": "user", "content": "hi"}]


async def test_a_text_becomes_tokens_and_tokens_a_text(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs())
    text = "The quick 🦊<|eos|> hello"
    ids = tokenizer.encode(text).ids
    body = {"model": MODEL, "prompt": text, "return_token_strs": True}
    answer = (await cluster.client.post("/tokenize", json=body)).json()
    assert answer == {
        "count": len(ids),
        "max_model_len": 4096,
        "tokens": ids,
        "token_strs": [tokenizer.id_to_token(token) for token in ids],
    }
    back = await cluster.client.post("/detokenize", json={"model": MODEL, "tokens": ids})
    assert back.json() == {"prompt": text, "content": text}
    plain = await cluster.client.post("/tokenize", json={"prompt": ""})
    assert (plain.json()["tokens"], plain.json()["token_strs"]) == ([], None)


@pytest.mark.parametrize(
    "options",
    [{}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"voice": "bard"}}],
)
async def test_a_chat_becomes_the_prompt_of_a_request(
    start: Start, options: dict[str, Any]
) -> None:
    cluster = await start(outputs())
    answer = await cluster.client.post("/tokenize", json={"messages": HI, **options})
    chat = await cluster.chat(max_tokens=1, return_token_ids=True, **options)
    assert answer.json()["tokens"] == chat.json()["prompt_token_ids"]
    assert answer.json()["count"] == chat.json()["usage"]["prompt_tokens"]


async def test_long_texts_and_prompts_beyond_the_context(start: Start) -> None:
    cluster = await start(outputs())
    text = "hello über alles " * 20_000  # encoded in a child process
    answer = (await cluster.client.post("/tokenize", json={"prompt": text})).json()
    assert answer["count"] == len(answer["tokens"]) > 4096
    back = await cluster.client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text, "content": text}


async def test_a_text_in_the_form_of_llama_cpp(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs())
    text = "hello über alles<|eos|> " * 20_000  # longer than other parameters may be
    for asked in ({}, {"add_special": True, "parse_special": True, "with_pieces": False}):
        reply = await cluster.client.post("/tokenize", json={"content": text, **asked})
        assert reply.status_code == 200, reply.text
        special = bool(asked)
        assert reply.json()["tokens"] == tokenizer.encode(text, add_special_tokens=special).ids
        assert "x-baton-ignored" not in reply.headers
    both = {"prompt": "hi", "content": "not this one"}
    reply = await cluster.client.post("/tokenize", json=both)
    assert reply.json()["tokens"] == tokenizer.encode("hi").ids
    assert reply.headers["x-baton-ignored"] == "content"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/tokenize", {}, "prompt", "is required"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "must be a string"),
        ("/tokenize", {"content": ["a"]}, "content", "must be a string"),
        ("/tokenize", {"content": "a", "with_pieces": True}, "with_pieces", "is not supported"),
        ("/tokenize", {"content": "a", "model": "other"}, "model", "does not exist"),
        ("/tokenize", {"messages": []}, "messages", "must not be empty"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template", "operator"),
        ("/tokenize", {"prompt": "x" * 200_000, "return_token_strs": True}, "return_token_strs",
         f"at most {MAX_TOKEN_STRINGS} tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", "does not exist"),
        ("/detokenize", {}, "tokens", "is required"),
        ("/detokenize", {"tokens": "x"}, "tokens", "must be an array of token ids"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens", "[1] must be a token id"),
        ("/detokenize", {"tokens": [2**40]}, "tokens", "the vocabulary ends at"),
    ],
)  # fmt: skip
async def test_mistakes(
    start: Start, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    cluster = await start(outputs())
    response = await cluster.client.post(path, json=body)
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
