"""The limits that SECURITY.md names: what is beyond them is refused, and names its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import outputs

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
PART = {"type": "text", "text": "x"}

BEYOND: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ["x"] * 129}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 3, "n": 43}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 65}, "n"),
    (COMPLETIONS, {"prompt": "x", "best_of": 65}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "stop": ["x"] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": "x" * 4097}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": list(range(65))}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "x" * 257}, "cache_salt"),
    (COMPLETIONS, {"prompt": [5] * 100_000}, "prompt"),
    (CHAT, {"messages": HI * 4097}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [PART] * 1025}]}, "messages[0].content"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL] * 129}]}, "tool_calls"),
    (CHAT, {"messages": HI, "tools": [TOOL] * 129}, "tools"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


async def test_beyond_each(start: Start) -> None:
    cluster = await start(outputs())
    for path, fields, param in BEYOND:
        answer = await cluster.client.post(path, json={"model": MODEL, **fields})
        error = answer.json()["error"]
        assert answer.status_code == 400, (param, answer.text[:300])
        assert param in str(error["param"]), error


@pytest.mark.parametrize(("depth", "of"), [(5000, "["), (5000, '{"a":')])
async def test_nesting(start: Start, depth: int, of: str) -> None:
    cluster = await start(outputs())
    headers = {"content-type": "application/json"}
    body = (of * depth).encode()
    answer = await cluster.client.post(COMPLETIONS, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_a_body_and_a_request_id(start: Start) -> None:
    cluster = await start(outputs())
    headers = {"content-type": "application/json"}
    answer = await cluster.client.post(
        COMPLETIONS, content=b" " * (8 << 20) + b"{", headers=headers
    )
    assert answer.status_code == 413
    answer = await cluster.client.get("/health", headers={"x-request-id": "x" * 129})
    assert len(answer.headers["x-request-id"]) == 32


def test_the_page_names_them() -> None:
    page = (Path(__file__).parents[3] / "SECURITY.md").read_text()
    for limit in ("8 MiB", "128; 128", "4096; 1024; 128", "16; 4096 characters; 64; 1024"):
        assert f"| {limit}" in page
