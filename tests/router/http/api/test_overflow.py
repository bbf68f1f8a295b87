"""The error for a prompt that is too long, in words that clients recognise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Start
from tests.router.fake_worker import outputs

BEGINNING = "This model's maximum context length is 4096 tokens. However, "
LONG = [{"role": "user", "content": "xy" * 5000}]
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "param", "ends"),
    [
        ("/v1/chat/completions", {"messages": LONG}, "messages",
         "tokens, which leaves none for the output."),
        ("/v1/chat/completions", {"messages": LONG, "max_tokens": 7}, "messages",
         "tokens, and max_tokens asks for 7 more."),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 4096},
         "max_completion_tokens", "tokens, and max_completion_tokens asks for 4096 more."),
        ("/v1/chat/completions", {"messages": HI, "min_tokens": 4096}, "min_tokens",
         "tokens, and min_tokens asks for 4096 more."),
        ("/v1/completions", {"prompt": [5] * 4096}, "prompt",
         "prompt has 4096 tokens, and max_tokens asks for 16 more."),
        ("/v1/responses", {"input": "xy" * 5000}, "input",
         "tokens, which leaves none for the output."),
    ],
)  # fmt: skip
async def test_the_error_names_what_the_client_sent(
    start: Start, path: str, body: dict[str, Any], param: str, ends: str
) -> None:
    cluster = await start(outputs())
    response = await cluster.client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param
    assert error["message"].startswith(BEGINNING)
    assert error["message"].endswith(ends)
