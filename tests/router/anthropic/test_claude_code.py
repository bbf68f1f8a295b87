"""Bodies as Claude Code sends them, and what it expects back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.router.anthropic.sessions import events_of
from tests.router.anthropic.test_messages import EOS, post, prompt_of, thinking_path
from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import speaks

__all__ = ["thinking_path"]

EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
HEADERS = {
    "authorization": "Bearer any",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-app": "cli",
    "x-claude-code-session-id": "0c2e3d6a-5a1f-4c7b-9b0e-0a9e1f0d2c3b",
}
MAIN: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32_000,
    "stream": True,
    "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.181.0ab; cch=00000;"},
        {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "# Environment\nLinux", "cache_control": EPHEMERAL},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "timeout": {"description": "milliseconds", "type": "number"},
                },
                "required": ["command"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                {"type": "text", "text": "List the files", "cache_control": EPHEMERAL},
            ],
        },
        {"role": "system", "content": "The user has 3 open files."},
    ],
}
ANSWER = """\
<think>
A listing.
</think>

I list them.
<tool_call>
{"name": "Bash", "arguments": {"command": "ls", "timeout": 5}}
</tool_call>"""


async def test_the_main_loop(start: Start, tokenizer: Tokenizer, thinking_path: Path) -> None:
    ids = tokenizer.encode(ANSWER).ids
    cluster = await start(speaks([*ids, EOS], together=4), model_path=str(thinking_path))
    path = "/v1/messages?beta=true"
    response = await cluster.client.post(path, json=MAIN, headers=HEADERS)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.content)
    opened = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert opened == ["thinking", "text", "tool_use"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2]
    assert [e["type"] for e in events if not e["type"].startswith("content_block")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["model"] == MODEL
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    first = prompt_of(cluster, tokenizer)
    assert "billing" not in first and "web_search" not in first
    assert "List the files\n\nThe user has 3 open files." in first

    call = next(
        e["content_block"] for e in events if e["type"] == "content_block_start" and e["index"] == 2
    )
    turn = [
        {"type": "thinking", "thinking": "A listing.", "signature": "baton"},
        {"type": "text", "text": "I list them."},
        {**call, "input": {"command": "ls", "timeout": 5}},
    ]
    found = {"type": "tool_result", "tool_use_id": call["id"], "content": "a.py", "is_error": False}
    more = [
        {"role": "assistant", "content": turn},
        {"role": "user", "content": [{**found, "cache_control": EPHEMERAL}]},
        {"role": "system", "content": "Token usage: 5000/200000; 195000 remaining"},
    ]
    body = {**MAIN, "messages": [*MAIN["messages"], *more]}
    assert (await cluster.client.post(path, json=body, headers=HEADERS)).status_code == 200
    before, after = (list(sent.request.prompt) for sent in cluster.workers[0].requests)
    assert after[: len(before) + len(ids)] == before + ids
    assert prompt_of(cluster, tokenizer).count("195000 remaining") == 1


async def test_the_other_requests(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode('{"title":"Files"}').ids, EOS]))
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    }
    title = await post(
        cluster,
        "/v1/messages?beta=true",
        thinking={"type": "disabled"},
        tools=[],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert title.json()["content"] == [{"type": "text", "text": '{"title":"Files"}'}]
    quota = await post(cluster, "/v1/messages?beta=true", max_tokens=1)
    assert quota.json()["stop_reason"] == "max_tokens"
    count = await cluster.client.post(
        "/v1/messages/count_tokens?beta=true",
        json={name: MAIN[name] for name in ("model", "messages", "tools", "system", "thinking")},
        headers=HEADERS,
    )
    assert count.json()["input_tokens"] > 50
    listed = await cluster.client.get("/v1/models?limit=1000", headers=HEADERS)
    assert listed.json()["data"][0]["display_name"] == MODEL
    for path in ("/api/hello", "/"):
        assert (await cluster.client.head(path)).status_code == 200
