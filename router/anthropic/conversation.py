"""The messages of ``/v1/messages`` become the messages of a chat.

    messages --> turns, with system messages folded where they stand --> chat messages

A client such as Claude Code appends a system message to nearly every turn. Written into the head of
the prompt it would change the prompt from there on, and no prefix cache would help. So only system
messages before the first turn belong to the head. Each later one is joined to a turn beside it:

    after a user's turn           to its text, or to its last tool result where it has no text
    after an assistant's turn     before the text of the next user's turn
    between a call and its result after the result

Nothing is joined to a turn that another turn follows, so a longer conversation begins with the
prompt of the shorter one. This is the rule of vLLM (entrypoints/anthropic/inline_system.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.anthropic.blocks import (
    AnthropicAssistantMessage,
    AnthropicSystemMessage,
    AnthropicUserMessage,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.anthropic.tools import ToolDefaults, short_name

BILLING_HEADER = "x-anthropic-billing-header"
"""Beginning of a system block of Claude Code that differs between conversations and says nothing to
the model."""


@dataclass
class UserTurn:
    """Tool results, then text. Of several user messages in a row one turn is made."""

    results: list[tuple[str, str]] = field(default_factory=list)  # id of the call, text
    texts: list[str] = field(default_factory=list)  # one per line


@dataclass
class AssistantTurn:
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolUseBlock] = field(default_factory=list)


Turn = UserTurn | AssistantTurn


class Conversation:
    """Collects the turns of one request, message by message."""

    def __init__(self) -> None:
        self.leading: list[str] = []  # system texts before the first turn
        self.turns: list[Turn] = []
        self._waiting: list[str] = []  # system texts that the next user's turn takes

    def add(self, message: InputMessage) -> None:
        if isinstance(message, AnthropicSystemMessage):
            self._add_system(system_text(message.content))
        elif isinstance(message, AnthropicUserMessage):
            self._add_user(message)
        else:
            self._add_assistant(message)

    def end(self) -> None:
        """Write the system texts that no user's turn has taken."""
        if self._waiting:
            self.turns.append(UserTurn(texts=["\n\n".join(self._waiting)]))
            self._waiting = []

    def _add_system(self, text: str) -> None:
        last = self.turns[-1] if self.turns else None
        if not text:
            return
        if last is None:
            self.leading.append(text)
        elif isinstance(last, AssistantTurn):
            self._waiting.append(text)
        else:
            _append_system(last, text)

    def _add_user(self, message: AnthropicUserMessage) -> None:
        results = [block for block in message.content if isinstance(block, ToolResultBlock)]
        texts = [block.text for block in message.content if isinstance(block, TextBlock)]
        last = self.turns[-1] if self.turns else None
        after_call = isinstance(last, AssistantTurn) and bool(last.calls)
        if not isinstance(last, UserTurn):
            last = UserTurn()
            self.turns.append(last)
        last.results += [(block.tool_use_id, result_text(block)) for block in results]
        waiting, self._waiting = "\n\n".join(self._waiting), []
        if waiting and not after_call:
            texts = ["\n\n".join([waiting, *texts[:1]]), *texts[1:]]
        last.texts += texts
        if waiting and after_call:
            _append_system(last, waiting)

    def _add_assistant(self, message: AnthropicAssistantMessage) -> None:
        self.end()
        last = self.turns[-1] if self.turns else None
        if not isinstance(last, AssistantTurn):
            last = AssistantTurn()
            self.turns.append(last)
        for block in message.content:
            if isinstance(block, TextBlock):
                last.texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                last.reasoning.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                last.calls.append(block)


def _append_system(turn: UserTurn, text: str) -> None:
    """Join a system text to the end of a user's turn. Never adds a turn after tool results: many
    templates keep earlier reasoning only up to the last one."""
    if turn.texts or not turn.results:
        turn.texts[-1:] = ["\n\n".join([*turn.texts[-1:], text])]
        return
    call, result = turn.results[-1]
    turn.results[-1] = call, "\n\n".join(filter(None, [result, text]))


def system_text(blocks: Iterable[object]) -> str:
    """Return the text of system blocks."""
    texts = (block.text for block in blocks if isinstance(block, TextBlock))
    return "\n\n".join(text for text in texts if text and not text.startswith(BILLING_HEADER))


def result_text(block: ToolResultBlock) -> str:
    """Return what a tool has returned, as the model reads it."""
    texts = [
        part.tool_name if isinstance(part, ToolReferenceBlock) else part.text
        for part in block.content
    ]
    text = "\n".join(texts)
    says_so = text.lower().startswith(("error", "<tool_use_error"))
    return f"Error: {text}" if block.is_error and not says_so else text


def chat_messages(
    system: str, messages: Sequence[InputMessage], defaults: ToolDefaults
) -> list[dict[str, Any]]:
    """Return the messages of a chat as its clients send them; ``system``: the field ``system``."""
    conversation = Conversation()
    for message in messages:
        conversation.add(message)
    conversation.end()
    head = "\n\n".join(filter(None, [system, *conversation.leading]))
    out: list[dict[str, Any]] = [{"role": "system", "content": head}] if head else []
    for turn in conversation.turns:
        if isinstance(turn, AssistantTurn):
            out.append(_assistant_message(turn, defaults))
            continue
        out += [
            {"role": "tool", "tool_call_id": call, "content": text} for call, text in turn.results
        ]
        if turn.texts or not turn.results:
            out.append({"role": "user", "content": "\n".join(turn.texts)})
    return out


def _assistant_message(turn: AssistantTurn, defaults: ToolDefaults) -> dict[str, Any]:
    content = "".join(turn.texts)
    # Templates write the line break between text and calls themselves, as the model did.
    content = content.rstrip("\n") if turn.calls else content
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if turn.reasoning:
        message["reasoning_content"] = "".join(turn.reasoning)
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": short_name(call.name),
                    "arguments": json.dumps(
                        defaults.as_written(call.name, call.input), ensure_ascii=False
                    ),
                },
            }
            for call in turn.calls
        ]
    return message
