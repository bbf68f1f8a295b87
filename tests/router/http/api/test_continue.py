"""Chats whose answer continues the last message, and what the answer repeats of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.router.conftest import Cluster, Start
from tests.router.fake_worker import outputs, speaks

BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well <|eos|>, "}]
CONTINUED: dict[str, Any] = {
    "messages": BEGUN,
    "continue_final_message": True,
    "add_generation_prompt": False,
}


async def prompt_of(cluster: Cluster, tokenizer: Tokenizer, **body: Any) -> str:
    response = await cluster.chat(max_tokens=1, **body)
    assert response.status_code == 200, response.text
    ids = list(cluster.workers[0].requests[-1].request.prompt)
    return str(tokenizer.decode(ids, skip_special_tokens=False))


async def test_the_prompt_ends_with_the_last_message(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs())
    text = await prompt_of(cluster, tokenizer, **CONTINUED)
    assert text == "user: hi<|eos|>\nassistant: Well <|eos|>, "
    del (unsaid := dict(CONTINUED))["add_generation_prompt"]
    assert await prompt_of(cluster, tokenizer, **unsaid) == text
    whole = await prompt_of(cluster, tokenizer, messages=BEGUN, add_generation_prompt=False)
    assert whole.startswith(text + "<|eos|>")


async def test_a_long_chat_is_continued_in_the_same_way(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs())
    for size in (10, 100_000):  # the second is rendered in a child process
        said = [{"role": "user", "content": "a" * size}, {"role": "assistant", "content": "So"}]
        body = {"messages": said, "continue_final_message": True}
        answer = (await cluster.client.post("/tokenize", json=body)).json()
        text = tokenizer.decode(answer["tokens"], skip_special_tokens=False)
        assert text.endswith("a<|eos|>\nassistant: So")


async def test_a_template_that_hides_the_last_message_is_named(
    start: Start, model_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "nothing"}))
    cluster = await start(outputs(), model_path=str(folder))
    error = (await cluster.chat(**CONTINUED)).json()["error"]
    assert (error["param"], error["code"]) == ("continue_final_message", "invalid_messages")


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, "Well <|eos|>, "),
        ({"echo": False}, ""),
        ({"messages": BEGUN[:1]}, ""),
        ({"continue_final_message": False, "add_generation_prompt": True}, ""),
    ],
)
async def test_echo_repeats_the_message_that_is_continued(
    start: Start, tokenizer: Tokenizer, changes: dict[str, Any], begins: str
) -> None:
    ids = tokenizer.encode("hello").ids
    cluster = await start(speaks([*ids, 0]))
    body = {**CONTINUED, "echo": True, "max_tokens": 20, "logprobs": True, **changes}
    message = (await cluster.chat(**body)).json()["choices"][0]
    assert message["message"]["content"] == f"{begins}hello"
    assert len(message["logprobs"]["content"]) == len(ids) + 1
    streamed = await cluster.chat(**body, stream=True)
    events = streamed.text.removesuffix("\n\n").split("\n\n")[:-1]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert chunks[0]["delta"] == {"role": "assistant", "content": begins, "refusal": None}
    assert "".join(c["delta"].get("content", "") for c in chunks) == f"{begins}hello"
    shown = [t for c in chunks if c["logprobs"] for t in c["logprobs"]["content"]]
    assert len(shown) == len(ids) + 1
