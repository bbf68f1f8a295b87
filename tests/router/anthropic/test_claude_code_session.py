"""A session of Claude Code 2.1.197 as it was seen on the wire, in short.

The client of this file sends the blocks of each message back with the results of its tools, adds to
a call the arguments that the model has left out, and a reminder as a system message. The model
reasons and is in the style of Qwen 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.router.anthropic.agent_templates import Written
from tests.router.anthropic.sessions import events_of, message_of
from tests.router.scripted_model import MODEL, scripted_router

HEADERS = {
    "authorization": "Bearer none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "x-app": "cli",
    "x-claude-code-session-id": "bd57002c",
    "x-stainless-retry-count": "0",
}
EDIT = {"file_path": "/a", "old_string": "one\n", "new_string": "one\ntwo\n"}
STEPS = [
    Written("First I make it.", "I make it.", [("Write", {"file_path": "/a", "content": "one\n"})]),
    Written("Now I append.", "", [("Edit", EDIT)]),
    Written("That is all.", "Done.", []),
]


def tool(name: str, *required: str, **optional: Any) -> dict[str, Any]:
    properties = {**{key: {"type": "string"} for key in required}, **optional}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "name": name,
        "description": f"{name} a file",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **schema,
            "additionalProperties": False,
        },
    }


def body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    replace_all = {"type": "boolean", "default": False}
    cached = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": MODEL,
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": "\nYou help with software.\n", **cached},
        ],
        "tools": [
            tool("Edit", "file_path", "old_string", "new_string", replace_all=replace_all),
            tool("Write", "file_path", "content"),
        ],
        "metadata": {"user_id": '{"device_id":"1","account_uuid":"","session_id":"bd57002c"}'},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def kinds_of(data: bytes) -> list[str]:
    """The types of the events and blocks, deltas once."""
    kinds = [
        event.get("content_block", event.get("delta", {})).get("type", event["type"])
        for event in events_of(data)
    ]
    return [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]


async def test_a_session(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>\n\n"},
                {"type": "text", "text": "Make a file."},
            ],
        },
        {"role": "system", "content": "Agents: none. Skills: none."},
    ]
    kinds = []
    async with scripted_router(tmp_path, STEPS) as router, httpx.AsyncClient() as client:
        assert (await client.head(f"{router.url}/")).status_code == 200
        for _ in STEPS:
            url = f"{router.url}/v1/messages?beta=true"
            reply = await client.post(url, json=body(messages), headers=HEADERS)
            assert reply.status_code == 200, reply.text
            kinds.append(kinds_of(reply.content))
            blocks = message_of(reply.content)["content"]
            results = []
            for block in blocks:
                if block["type"] == "tool_use":
                    if block["name"] == "Edit":
                        block["input"] = {"replace_all": False, **block["input"]}
                    made = {"type": "tool_result", "tool_use_id": block["id"], "content": "made"}
                    results.append({**made, "cache_control": {"type": "ephemeral"}})
            messages.append({"role": "assistant", "content": blocks})
            if results:
                messages.append({"role": "user", "content": results})
                messages.append({"role": "system", "content": "1000 tokens are left."})
    thought = ["thinking", "thinking_delta", "signature_delta", "content_block_stop"]
    text = ["text", "text_delta", "content_block_stop"]
    call = ["tool_use", "input_json_delta", "content_block_stop"]
    end = ["message_delta", "message_stop"]
    assert kinds == [
        ["message_start", *thought, *text, *call, *end],
        ["message_start", *thought, *call, *end],
        ["message_start", *thought, *text, *end],
    ]
    assert blocks[-1] == {"type": "text", "text": "Done."}
    assert len(router.turns) == 3
    assert all(past == kept for past, kept in router.kept()), router.kept()
