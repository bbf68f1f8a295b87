"""``TurnBuilder``: adjacent items become one message of a chat.

    reasoning, text, calls of the assistant   one assistant's message
    user texts                                one user's message
    leading system texts                      one system message
    a later system text                       text of the message after which it stands, or before
                                              the next user's text where that was the assistant's

Many templates take one system message, at the start, and alternating roles. A system text is never
moved to the front, and no earlier message changes, so that a longer conversation begins with the
prompt of the shorter one, token for token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_BETWEEN = "\n\n"  # texts that share a message


@dataclass
class _Turn:
    """A message in the making: texts are joined once, at the end."""

    role: str
    path: str  # of the first item
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None  # of a tool's message

    def message(self) -> dict[str, Any]:
        text = _BETWEEN.join(self.texts)
        # Templates write the line break between text and calls themselves, as the model did.
        text = text.rstrip("\n") if self.calls else text
        found: dict[str, Any] = {"role": self.role, "content": text}
        if self.reasoning:
            found["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            found["tool_calls"] = self.calls
        if self.call_id is not None:
            found["tool_call_id"] = self.call_id
        return found


class TurnBuilder:
    """Collects the turns of one request, item by item."""

    def __init__(self, instructions: str | None) -> None:
        self._turns: list[_Turn] = []
        self._late: list[str] = []  # system texts that wait for a message that may take them
        self._open_calls: set[str] = set()  # calls of the last turn without an output
        if instructions:
            self.add_system(instructions, "instructions")

    def add_user(self, text: str, path: str) -> None:
        self._open_calls.clear()
        self._turn("user", path).texts += [*self._late, text]
        self._late.clear()

    def add_system(self, text: str, path: str) -> None:
        if self._last_role() in (None, "system"):
            self._turn("system", path).texts.append(text)
        elif self._last_role() == "assistant" or self._open_calls:
            self._late.append(text)
        else:
            self._turns[-1].texts.append(text)

    def add_reasoning(self, text: str, path: str) -> None:
        if text:
            self._assistant(path).reasoning.append(text)

    def add_answer(self, text: str, path: str) -> None:
        self._assistant(path).texts.append(text)

    def add_call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant(path).calls.append(call)
        self._open_calls.add(call_id)

    def add_output(self, call_id: str, text: str, path: str) -> None:
        self._open_calls.discard(call_id)
        self._turns.append(_Turn("tool", path, [text], call_id=call_id))
        if not self._open_calls:
            self._turns[-1].texts += self._late
            self._late.clear()

    def finish(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the messages, and the path of each one's first item."""
        self._write_late()
        return [turn.message() for turn in self._turns], [turn.path for turn in self._turns]

    def _last_role(self) -> str | None:
        return self._turns[-1].role if self._turns else None

    def _write_late(self) -> None:
        """Make waiting system texts the user's, where no other message takes them."""
        if self._late:
            late, self._late = self._late, []
            self._turn("user", self._turns[-1].path).texts += late

    def _assistant(self, path: str) -> _Turn:
        if self._last_role() != "assistant":
            self._open_calls.clear()
        if not self._open_calls:
            self._write_late()
        return self._turn("assistant", path)

    def _turn(self, role: str, path: str) -> _Turn:
        """Return the last turn if it is of that role, otherwise a new one."""
        if self._last_role() != role:
            self._turns.append(_Turn(role, path))
        return self._turns[-1]
