"""A session of Codex 0.169.0 as it was seen on the wire, in short: what it sends and waits for.

The client of this file keeps the items of ``response.output_item.done`` and sends them back with
the outputs of its tools, as Codex does. The model reasons and is in the style of Qwen 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.router.anthropic.agent_templates import Written
from tests.router.openai.responses import codex
from tests.router.openai.responses.streams import events_of, items_of
from tests.router.openai.responses.test_codex import kinds_of
from tests.router.scripted_model import MODEL, scripted_router

STEPS = [
    Written("First I make it.", "I make it.", [("exec_command", {"cmd": "echo one > a"})]),
    Written("Now I read it.", "", [("multi_agent_v1__wait_agent", {"target": "x"})]),
    Written("That is all.", "Done.", []),
]
REASONING = (
    *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
    *("content_part.done", "output_item.done"),
)
MESSAGE = (
    *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
    *("content_part.done", "output_item.done"),
)
CALL = (
    *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
    "output_item.done",
)


def with_id(item: dict[str, Any], name: str) -> dict[str, Any]:
    return {**item, "id": f"{name}_01a2085e-b491-7fa1-b79f-df34b843d1ae"}


def opening() -> list[dict[str, Any]]:
    """The instructions are a developer's message, not the field ``instructions``."""
    return [
        with_id(codex.message("developer", "You are a coding agent."), "msg"),
        with_id(codex.message("developer", "<skills>none</skills>", "<plugins></plugins>"), "msg"),
        with_id(codex.message("user", "<environment_context>/work</environment_context>"), "msg"),
        with_id(codex.message("user", "Make a file."), "msg"),
    ]


def body(items: list[dict[str, Any]]) -> dict[str, Any]:
    agents = {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Starts agents.",
        "tools": [codex.function("wait_agent", target="string")],
    }
    return {
        "model": MODEL,
        "stream": True,
        "input": items,
        "tools": [*codex.TOOLS[:3], agents],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2085e",
        "client_metadata": {"session_id": "01a2085e", "x-codex-turn-metadata": "{}"},
    }


async def test_a_session(tmp_path: Path) -> None:
    sent, kinds, last = opening(), [], []
    async with scripted_router(tmp_path, STEPS) as router, httpx.AsyncClient() as client:
        for _ in STEPS:
            url = f"{router.url}/v1/responses"
            reply = await client.post(url, json=body(sent), headers=codex.HEADERS)
            assert reply.status_code == 200, reply.text
            events = events_of(reply.text)
            kinds.append(kinds_of(events))
            last = items_of(events)
            sent += last
            for call in last:
                if call["type"] == "function_call":
                    output = {"type": "function_call_output", "call_id": call["call_id"]}
                    text = "Chunk ID: e10835\nProcess exited with code 0\nOutput:\nmade\n"
                    sent.append(with_id({**output, "output": text}, "fco"))
    start = ("created", "in_progress")
    assert kinds == [
        [*start, *REASONING, *MESSAGE, *CALL, "completed"],
        [*start, *REASONING, *CALL, "completed"],
        [*start, *REASONING, *MESSAGE, "completed"],
    ]
    assert last[-1]["content"][0]["text"] == "Done."
    [spawned] = [item for item in sent if item.get("namespace")]
    assert (spawned["namespace"], spawned["name"]) == ("multi_agent_v1", "wait_agent")
    assert len(router.turns) == 3
    assert all(past == kept for past, kept in router.kept()), router.kept()
