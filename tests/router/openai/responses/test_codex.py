"""Turns of Codex over a fake worker: the bodies that it sends, and the events that it waits for."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.router.conftest import Cluster, Start
from tests.router.fake_worker import speaks
from tests.router.http.api.test_chat import EOS, prompt_of
from tests.router.openai.responses import codex
from tests.router.openai.responses.streams import events_of, items_of


async def turn(
    cluster: Cluster, body: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events and the items of one request."""
    reply = await cluster.client.post("/v1/responses", json=body, headers=codex.HEADERS)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply.text)
    return events, items_of(events)


def calls(*named: tuple[str, Any]) -> str:
    written = [json.dumps({"name": name, "arguments": values}) for name, values in named]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """The types without ``response.``, deltas once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]


@pytest.fixture
async def cluster(start: Start) -> Cluster:
    return await start(speaks([EOS]))


def answers(cluster: Cluster, tokenizer: Tokenizer, text: str) -> None:
    cluster.workers[0].script = speaks([*tokenizer.encode(text).ids, EOS])


async def test_a_call_of_a_function(cluster: Cluster, tokenizer: Tokenizer) -> None:
    answers(cluster, tokenizer, "I look." + calls(("exec_command", {"cmd": "ls"})))
    events, items = await turn(cluster, codex.body())
    assert kinds_of(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    said, call = items
    assert said["role"] == "assistant"
    assert said["content"][0] == {
        **{"type": "output_text", "text": "I look."},
        **{"annotations": [], "logprobs": []},
    }
    assert (call["name"], call.get("namespace")) == ("exec_command", None)
    assert json.loads(call["arguments"]) == {"cmd": "ls"}
    added = [event["item"] for event in events if event["type"].endswith("item.added")]
    assert added[1]["arguments"] == ""
    usage = events[-1]["response"]["usage"]
    assert usage["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_call_in_a_namespace_has_a_bare_name(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    answers(cluster, tokenizer, calls(("mcp__files__read_file", {"path": "/a"})))
    _, [call] = await turn(cluster, codex.body())
    assert (call["type"], call["name"]) == ("function_call", "read_file")
    assert call["namespace"] == "mcp__files"
    assert call["call_id"] and call["id"].startswith("fc_")


async def test_a_call_of_a_custom_tool(cluster: Cluster, tokenizer: Tokenizer) -> None:
    patch = '*** Begin Patch\n+ "ü" \\ 🦊\n*** End Patch'
    answers(cluster, tokenizer, calls(("apply_patch", {"input": patch})))
    events, [call] = await turn(cluster, codex.body())
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert call["id"].startswith("ctc_")
    assert kinds_of(events)[2:-1] == [
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done"),
        "output_item.done",
    ]


async def test_a_search_for_tools(cluster: Cluster, tokenizer: Tokenizer) -> None:
    answers(cluster, tokenizer, calls(("tool_search", {"query": "issues"})))
    _, [call] = await turn(cluster, codex.body())
    assert call["type"] == "tool_search_call"
    assert (call["execution"], call["arguments"]) == ("client", {"query": "issues"})
    found = {
        "type": "tool_search_output",
        "call_id": call["call_id"],
        "status": "completed",
        "execution": "client",
        "tools": [
            {
                "type": "namespace",
                "name": "mcp__tracker",
                "description": "",
                "tools": [{"type": "function", "name": "issues", "parameters": {"type": "object"}}],
            }
        ],
    }
    answers(cluster, tokenizer, calls(("mcp__tracker__issues", {})))
    _, [call] = await turn(cluster, codex.body(call, found))
    assert (call["name"], call["namespace"]) == ("issues", "mcp__tracker")
    assert "mcp__tracker__issues" in prompt_of(cluster, tokenizer)


async def test_lite_mode(cluster: Cluster, tokenizer: Tokenizer) -> None:
    text = calls(("exec_command", {"cmd": "ls"}), ("apply_patch", {"input": "x"}))
    answers(cluster, tokenizer, text)
    _, items = await turn(cluster, codex.LITE)
    assert [(item["name"], item.get("namespace")) for item in items] == [
        ("exec_command", None),
        ("apply_patch", None),
    ]


async def test_only_one_call_where_calls_are_not_parallel(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    named = [("exec_command", {"cmd": "a"}), ("exec_command", {"cmd": "b"})]
    answers(cluster, tokenizer, calls(*named))
    _, items = await turn(cluster, codex.body(parallel_tool_calls=False))
    assert [json.loads(item["arguments"]) for item in items] == [{"cmd": "a"}]


async def test_prompts_of_a_session_extend_each_other(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    history: list[dict[str, Any]] = []
    prompts = []
    for number in range(4):
        answers(cluster, tokenizer, calls(("exec_command", {"cmd": f"step {number}"})))
        _, items = await turn(cluster, codex.body(*history))
        prompts.append(prompt_of(cluster, tokenizer).removesuffix("assistant:"))
        [call] = items
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
        note = codex.message("developer", f"{number} tokens are left")
        history += [call, output, *[note] * (number == 1)]
    assert all(b.startswith(a) for a, b in itertools.pairwise(prompts))
    assert prompts[-1].count("tokens are left") == 1
    submitted = cluster.workers[0].requests
    assert len(submitted) == 4


async def test_a_schema_for_the_output(cluster: Cluster, tokenizer: Tokenizer) -> None:
    answers(cluster, tokenizer, '{"ok":true}')
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "name": "codex_output_schema", "strict": True}
    text = {"format": {**wanted, "schema": schema}}
    _, [said] = await turn(cluster, codex.body(text=text))
    assert json.loads(said["content"][0]["text"]) == {"ok": True}
    assert cluster.workers[0].requests[-1].request.sampling.grammar


async def test_a_prompt_that_is_too_long_fails_inside_the_stream(cluster: Cluster) -> None:
    body = codex.body(codex.message("user", "x" * 20_000))
    events, items = await turn(cluster, body)
    assert kinds_of(events) == ["created", "failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "context_length_exceeded"
    assert not items and not cluster.workers[0].requests
    reply = await cluster.client.post("/v1/responses", json={**body, "stream": False})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


async def test_a_refusal_under_load_says_when_to_come_again(start: Start) -> None:
    cluster = await start(speaks([EOS]), admission_ttft_ms=1e-6)
    events, _ = await turn(cluster, codex.body())
    error = events[-1]["response"]["error"]
    assert error["code"] == "rate_limit_exceeded"
    # The expression with which Codex finds the time to wait.
    found = re.search(r"(?i)try again in\s*(\d+(?:\.\d+)?)\s*(s|ms|seconds?)", error["message"])
    assert found is not None and float(found[1]) >= 1
    reply = await cluster.client.post("/v1/responses", json=codex.body(stream=False))
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1
