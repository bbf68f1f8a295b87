"""Bad chats: status, field, code, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import MODEL, Start
from tests.router.errors import check
from tests.router.fake_worker import outputs

UNKNOWN, UNSUPPORTED = "unknown_parameter", "unsupported_parameter"
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
HI: Any = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, **fields}


def tool(**fields: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"}, **fields},
    }


def called(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", **fields}}


# fmt: off
CASES: list[tuple[dict[str, Any], int, str | None, str | None, str]] = [
    ({"model": MODEL}, 400, "messages", "missing_required_parameter", "is required"),
    (chat(messages=[]), 400, "messages", None, "must not be empty"),
    (chat(messages="hi"), 400, "messages", None, "must be an array, not 'hi'"),
    (chat(messages=HI * 5000), 400, "messages", None, "must have at most 4096 entries, not 5000"),
    (chat(messages=[5]),
     400, "messages[0]", "invalid_value", "must be an object with a role: 'system',"),
    (chat(messages=[{}]),
     400, "messages[0]", "invalid_value", "must be an object with a role: 'system',"),
    (chat(messages=[{"role": "user"}]),
     400, "messages[0].content", "missing_required_parameter", "is required"),
    (chat(messages=[{"content": "x"}]),
     400, "messages[0]", "invalid_value", "must be an object with a role: 'system',"),
    (chat(messages=[{"role": "boss", "content": "x"}]),
     400, "messages[0]", "invalid_value", "must be an object with a role: 'system',"),
    (chat(messages=[{"role": "user", "content": 5}]),
     400, "messages[0].content", None, "must be a string or an array of text parts,"),
    (chat(messages=[{"role": "user", "content": [5] * 1025}]),
     400, "messages[0].content", None, "must hold at most 1024 parts, not 1025"),
    (chat(messages=[{"role": "user", "content": [IMAGE]}]),
     400, "messages[0].content", "unsupported_value", "messages[0].content[0] is of type"),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
     400, "messages[0].content", None, "messages[0].content[0].text must be a"),
    (chat(messages=[{"role": "user", "content": [{"text": "a"}]}]),
     400, "messages[0].content", None, "messages[0].content[0] must be a part such"),
    (chat(messages=[{"role": "user", "content": [{"type": "txt", "text": "a"}]}]),
     400, "messages[0].content", "unsupported_value", "messages[0].content[0] is of type 'txt';"),
    (chat(messages=[{"role": "user", "content": "x", "name": "é "}]),
     400, "messages[0].name", None, "must match ^[^\\s<|\\\\/>]{1,64}$, not 'é '"),
    (chat(messages=[{"role": "tool", "content": "x"}]),
     400, "messages[0].tool_call_id", "missing_required_parameter", "is required"),
    (chat(messages=[{"role": "tool", "content": "x", "tool_call_id": 5}]),
     400, "messages[0].tool_call_id", None, "must be a string, not 5"),
    (chat(messages=[{"role": "assistant", "tool_calls": [called(arguments={})]}]),
     400, "messages[0].tool_calls[0].function.arguments", None, "must be a string, not {}"),
    (chat(messages=[{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]),
     400, "messages[0].tool_calls[0].function", "missing_required_parameter", "is required"),
    (chat(messages=[{"role": "assistant", "tool_calls": "x"}]),
     400, "messages[0].tool_calls", None, "must be an array, not 'x'"),
    (chat(messages=[{"role": "system", "content": [{"type": "image_url"}]}]),
     400, "messages[0].content", "unsupported_value", "messages[0].content[0] is of type"),
    (chat(messages=[{"role": ["user"], "content": "x"}]),
     400, "messages[0]", "invalid_value", "must be an object with a role: 'system',"),
    (chat(prompt="x"),
     400, "prompt", UNSUPPORTED, "is not supported (prompts go to /v1/completions"),
    (chat(input="x"),
     400, "input", UNSUPPORTED, "is not supported (prompts go to /v1/completions"),
    (chat(max_tokens=0), 400, "max_tokens", None, "must be at least 1, not 0"),
    (chat(max_completion_tokens=0),
     400, "max_completion_tokens", None, "must be at least 1, not 0"),
    (chat(max_tokens=5, max_completion_tokens=6),
     400, "max_tokens", None, "is max_completion_tokens by its older name:"),
    (chat(max_completion_tokens=5000),
     400, "max_completion_tokens", "context_length_exceeded", "maximum context length is 4096"),
    (chat(max_completion_tokens="x"),
     400, "max_completion_tokens", None, "must be an integer, not 'x'"),
    (chat(min_tokens=5, max_tokens=4),
     400, "min_tokens", None, "must be at most max_tokens (4), not 5"),
    (chat(min_tokens=5000),
     400, "min_tokens", "context_length_exceeded", "maximum context length is 4096 tokens"),
    (chat(logprobs=5), 400, "logprobs", None, "must be true or false, not 5"),
    (chat(logprobs="true"), 400, "logprobs", None, "must be true or false, not 'true'"),
    (chat(top_logprobs=2), 400, "top_logprobs", None, "is only allowed with logprobs=true"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", None, "must be at most 20, not 21"),
    (chat(n=0), 400, "n", None, "must be at least 1, not 0"),
    (chat(n=65), 400, "n", None, "must be at most 64, not 65"),
    (chat(best_of=2),
     400, "best_of", UNSUPPORTED, "is not supported: leave it out, or send 1"),
    (chat(echo=1), 400, "echo", None, "must be true or false, not 1"),
    (chat(tools={}), 400, "tools", None, "must be an array, not {}"),
    (chat(tools=[5]), 400, "tools[0]", None, "must be an object, not 5"),
    (chat(tools=[{}]), 400, "tools[0].type", "missing_required_parameter", "is required"),
    (chat(tools=[{"type": "web_search"}]),
     400, "tools[0].type", None, "must be 'function', not 'web_search'"),
    (chat(tools=[{"type": "function"}]),
     400, "tools[0].function", "missing_required_parameter", "is required"),
    (chat(tools=[{"type": "function", "function": {}}]),
     400, "tools[0].function.name", "missing_required_parameter", "is required"),
    (chat(tools=[tool(name="a b")]),
     400, "tools[0].function.name", None, "must be 1 to 64 letters, digits, '_' or"),
    (chat(tools=[tool(name="")]),
     400, "tools[0].function.name", None, "must be 1 to 64 letters, digits, '_' or"),
    (chat(tools=[tool(name="x" * 65)]),
     400, "tools[0].function.name", None, "must be 1 to 64 letters, digits, '_' or"),
    (chat(tools=[tool(), tool()]),
     400, "tools[1].function.name", None, "'f' is taken by another tool"),
    (chat(tools=[tool(parameters=5)]),
     400, "tools[0].function.parameters", None, "must be an object, not 5"),
    (chat(tools=[tool(parameters={"type": "string"})]),
     400, "tools[0].function.parameters", "invalid_schema", "must be a schema of type 'object'"),
    (chat(tools=[tool(parameters={"type": "object", "properties": {"a": {"type": "nope"}}})]),
     400, "tools[0].function.parameters", "invalid_schema", "cannot be used: Invalid type: nope"),
    (chat(tools=[tool(description=5)]),
     400, "tools[0].function.description", None, "must be a string, not 5"),
    (chat(tools=[tool(strict="x")]),
     400, "tools[0].function.strict", None, "must be true or false, not 'x'"),
    (chat(tools=[tool(foo=1)]),
     400, "tools[0].function.foo", UNKNOWN, "unknown parameter 'tools[0].function.foo'"),
    (chat(tools=[tool(name=f"f{i}") for i in range(129)]),
     400, "tools", None, "must have at most 128 entries, not 129"),
    (chat(tool_choice="required"), 400, "tool_choice", None, "is only allowed with tools"),
    (chat(tools=[tool()], tool_choice="any"),
     400, "tool_choice", "invalid_value", "must be 'none', 'auto' or 'required', or"),
    (chat(tools=[tool()], tool_choice=5),
     400, "tool_choice", "invalid_value", "must be 'none', 'auto' or 'required', or"),
    (chat(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}),
     400, "tool_choice.function.name", None, "'g' is not among tools"),
    (chat(tools=[tool()], tool_choice={"type": "function"}),
     400, "tool_choice.function", "missing_required_parameter", "is required"),
    (chat(tools=[tool()], tool_choice={"type": "function", "name": "f"}),
     400, "tool_choice.function", "missing_required_parameter", "is required"),
    (chat(tools=[tool()], parallel_tool_calls="x"),
     400, "parallel_tool_calls", None, "must be true or false, not 'x'"),
    (chat(functions=[{}]),
     400, "functions", UNSUPPORTED, "is not supported (use tools): leave it out,"),
    (chat(function_call={"name": "f"}),
     400, "function_call", UNSUPPORTED, "is not supported (use tool_choice): leave"),
    (chat(chat_template="x"),
     400, "chat_template", UNSUPPORTED, "is not supported (the template is the"),
    (chat(chat_template_kwargs=5), 400, "chat_template_kwargs", None, "must be an object, not 5"),
    (chat(chat_template_kwargs={"messages": []}),
     400, "chat_template_kwargs", None, "must not hold 'messages'"),
    (chat(add_generation_prompt="x"),
     400, "add_generation_prompt", None, "must be true or false, not 'x'"),
    (chat(continue_final_message=True, add_generation_prompt=True),
     400, "continue_final_message", None, "is only allowed with add_generation_prompt=false"),
    (chat(store="yes"), 400, "store", None, "must be true or false, not 'yes'"),
    (chat(service_tier="x" * 65),
     400, "service_tier", None, "must have at most 64 characters, not 65"),
    (chat(metadata={"a": 5}), 400, "metadata.a", None, "must be a string, not 5"),
    (chat(metadata={str(i): "x" for i in range(17)}),
     400, "metadata", None, "must have at most 16 entries, not 17"),
    (chat(metadata="x"), 400, "metadata", None, "must be an object, not 'x'"),
    (chat(modalities=["audio"]),
     400, "modalities", UNSUPPORTED, "is not supported: leave it out, or send"),
    (chat(audio={}),
     400, "audio", UNSUPPORTED, "is not supported: leave it out, or send null"),
    (chat(reasoning_effort="huge"), 400, "reasoning_effort", None, "must be 'none', 'minimal', "),
    (chat(thinking_token_budget=True), 400, "thinking_token_budget", None, "must be an integer"),
    (chat(verbosity="low"),
     400, "verbosity", UNSUPPORTED, "is not supported: leave it out, or send"),
    (chat(prediction={}),
     400, "prediction", UNSUPPORTED, "is not supported: leave it out, or send null"),
    (chat(web_search_options={}),
     400, "web_search_options", UNSUPPORTED, "is not supported: leave it out, or send null"),
    (chat(stream_options={"include_usage": True}),
     400, "stream_options", None, "is only allowed with stream=true"),
    (chat(temperature=9), 400, "temperature", None, "must be at most 2, not 9"),
    (chat(user=["x"]), 400, "user", None, "must be a string, not ['x']"),
    (chat(stop={"a": 1}), 400, "stop", None, "must be a string or an array of strings,"),
]
# fmt: on


@pytest.mark.parametrize(("body", "status", "param", "code", "says"), CASES)
async def test_refusals(
    start: Start, body: dict[str, Any], status: int, param: str | None, code: str | None, says: str
) -> None:
    cluster = await start(outputs())
    response = await cluster.client.post("/v1/chat/completions", json=body)
    check(response, status, param, code, says)
    assert not cluster.workers[0].requests
