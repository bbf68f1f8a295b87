"""Agent sessions: a client like Claude Code, and a model that writes what a test lets it write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import UNSET
from tokenizers import Tokenizer

from router.anthropic.body import MessagesRequest, parse_messages
from router.anthropic.formatter import MessageFormatter
from router.generation.choice_text import ChoiceDelta
from router.openai.answers.formatter import ResponseHeader
from router.openai.answers.wire_json import Usage
from router.openai.bodies.tools import ToolOptions
from router.openai.chat.output_plan import OutputPlan
from router.openai.chat.template import ChatTemplate
from router.openai.prompts.model_formats import ModelFormats
from tests.router.anthropic.agent_templates import AgentModel, Written
from tests.router.openai.chat.toy import byte_level, save

TOOLS = [
    {"name": name, "description": f"{name} a file", "input_schema": {"type": "object"}}
    for name in ("Read", "Edit", "Bash")
]


class Server:
    """What a router does between a body and its prompt, and between an output and its events."""

    def __init__(self, model: AgentModel, folder: Path) -> None:
        self.tokenizer: Tokenizer = byte_level()
        save(folder, self.tokenizer, model.template)
        special = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
        self.template = ChatTemplate({"default": model.template}, special, self.tokenizer)
        self.formats = ModelFormats(self.tokenizer, self.template, str(folder))

    def close(self) -> None:
        self.formats.close()

    def prompt(self, body: dict[str, Any]) -> tuple[list[int], str, OutputPlan, MessagesRequest]:
        """Return the prompt as token ids and as text, and the plan of the output."""
        request = parse_messages(json.loads(json.dumps(body)))
        chat = request.chat
        options = ToolOptions(chat.tools or (), chat.tool_choice, chat.parallel_tool_calls)
        plan = self.formats._planner.plan(options)
        text, mark = self.template.render(
            chat.messages, plan.tools, options=self.formats.template_options(chat)
        )
        ids = self.template.encode(text, mark)
        plain = text.replace(mark, "") if mark else text
        plan = self.formats.plan_reasoning(plan, chat.reasoning, plain[-256:], 1000)
        return ids, plain, plan, request

    def answer(self, plan: OutputPlan, request: MessagesRequest, text: str) -> list[dict[str, Any]]:
        """Return the content blocks that a client makes of the events of an output."""
        header = ResponseHeader("msg_1", 0, request.chat.model or "", "fp")
        formatter = MessageFormatter(header, plan, 10, request.long_names)
        half = len(text) // 2
        data = formatter.opening() + formatter.events(
            ChoiceDelta(0, text[:half], [1], [], None), None
        )
        data += formatter.events(ChoiceDelta(0, text[half:], [2], [], "stop"), None)
        message = message_of(data + formatter.closing(Usage.of(10, 2, 0), UNSET))
        content: list[dict[str, Any]] = message["content"]
        return content


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names must be their types."""
    events = []
    for block in data.decode().split("\n\n"):
        if not block:
            continue
        name, _, payload = block.partition("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def message_of(data: bytes) -> dict[str, Any]:
    """Return the message that the events of a stream make up."""
    events = events_of(data)
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events[1:-2]:
        blocks = message["content"]
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            continue
        if event["type"] == "ping":
            continue
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(inputs.get(event["index"]) or "{}")
            continue
        kind = event["delta"].pop("type")
        [value] = event["delta"].values()
        if kind == "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + value
        else:
            field = kind.removesuffix("_delta")
            blocks[-1][field] += value
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return message


class Client:
    """A client's conversation. Nothing that it has sent ever changes, but for ``cache_control``."""

    def __init__(self, system: list[str], *, tools: bool, **fields: Any) -> None:
        blocks = [f"x-anthropic-billing-header: cc_version=2.1; cch={id(self)}", *system]
        self._fields = {
            "model": "tiny",
            "max_tokens": 32000,
            "stream": True,
            "system": [{"type": "text", "text": text} for text in blocks],
            "metadata": {"user_id": "user_1"},
            **({"tools": TOOLS} if tools else {}),
            **fields,
        }
        self.messages: list[dict[str, Any]] = []

    def body(self) -> dict[str, Any]:
        """Return the next body, with a mark of the cache at its end."""
        messages = json.loads(json.dumps(self.messages))
        content = messages[-1]["content"]
        if isinstance(content, list) and content:
            content[-1]["cache_control"] = {"type": "ephemeral"}
        return {**self._fields, "messages": messages}

    def system(self, text: str) -> None:
        self.messages.append({"role": "system", "content": text})

    def user(self, *texts: str) -> None:
        content = [{"type": "text", "text": text} for text in texts]
        self.messages.append({"role": "user", "content": content})

    def assistant(self, content: list[dict[str, Any]]) -> None:
        self.messages.append({"role": "assistant", "content": content})

    def results(
        self, texts: list[str], *, more: tuple[str, ...] = (), failed: bool = False
    ) -> None:
        """Answer the calls of the last turn."""
        calls = [b for m in self.messages if m["role"] == "assistant" for b in m["content"]]
        ids = [block["id"] for block in calls if block["type"] == "tool_use"][-len(texts) :]
        content: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": call, "content": text, "is_error": failed}
            for call, text in zip(ids, texts, strict=True)
        ]
        content += [{"type": "text", "text": text} for text in more]
        self.messages.append({"role": "user", "content": content})


def common_prefix(one: list[int], other: list[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


__all__ = ["Client", "Server", "Written", "common_prefix", "events_of", "message_of"]
