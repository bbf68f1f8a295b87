"""The input items of ``/v1/responses`` as messages of a chat.

    reasoning, message, function_call     -->  one assistant's message
    function_call_output                  -->  a tool's message
    instructions, system, developer       -->  system messages, where they stand
    additional_tools, tool_search_output  -->  tools of the whole request

``TurnBuilder`` joins the texts of adjacent items. Items of hosted tools are left out; other unknown
items are refused, because they carry the conversation's state.
"""

from __future__ import annotations

import json
from typing import Any

from router.common.errors import ApiError, invalid
from router.openai.bodies.field_types import list_alternatives, show_value
from router.openai.responses.tools import TOOL_SEARCH, ToolName, ToolSet
from router.openai.responses.turns import TurnBuilder

SKIPPED_ITEMS = frozenset(
    {
        "code_interpreter_call",
        "compaction",
        "compaction_summary",
        "configuration_update",
        "context_compaction",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "web_search_call",
    }
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}
_REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_LEFT_OUT = {
    "input_image": "[An image, which this model cannot read.]",
    "input_file": "[A file, which this model cannot read.]",
}
"""Parts of a tool's output that are replaced by a note: refusing them would end the session."""


def collect_tools(tools: Any, items: Any) -> tuple[ToolSet, dict[int, list[ToolName]]]:
    """Return the tools of ``tools`` and of the items that add some, and the names that each such
    item adds by its index. Raises ApiError (400)."""
    known, found = ToolSet(), dict[int, list[ToolName]]()
    if tools is not None:
        known.add_all(tools, "tools")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") in (
            "additional_tools",
            "tool_search_output",
        ):
            found[index] = known.add_all(item.get("tools"), f"input[{index}].tools")
    return known, found


def read_items(
    value: Any, instructions: str | None, tools: ToolSet, found: dict[int, list[ToolName]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of ``input``, and the path of each one's first item. Raises ApiError
    (400) that names the item."""
    turns = TurnBuilder(instructions)
    if isinstance(value, str):
        turns.add_user(value, "input")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _ItemReader(turns, tools, f"input[{index}]", found.get(index, [])).read(item)
    else:
        raise invalid(f"input must be a string or an array, not {show_value(value)}", "input")
    messages, paths = turns.finish()
    if all(message["role"] == "system" for message in messages):
        raise invalid("input must hold a message that is not the system's", "input")
    return messages, paths


class _ItemReader:
    """Reads the item at ``path``."""

    def __init__(
        self, turns: TurnBuilder, tools: ToolSet, path: str, found: list[ToolName]
    ) -> None:
        self._into = turns
        self._tools = tools
        self._path = path
        self._found = found

    def read(self, item: Any) -> None:
        if not isinstance(item, dict):
            message = f"{self._path} must be an object, not {show_value(item)}"
            raise invalid(message, self._path)
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str):
            raise invalid(f"{self._path} must have a type or a role", self._path)
        if kind in SKIPPED_ITEMS or kind == "additional_tools":
            return
        readers = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "tool_search_call": self._search_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "tool_search_output": self._search_output,
        }
        if kind not in readers:
            raise self._unsupported(kind)
        readers[kind](item)

    def _unsupported(self, kind: str) -> ApiError:
        if kind == "item_reference":
            why = "is a reference, but nothing is stored here: send the item itself"
        else:
            why = f"is of type {show_value(kind)}, which this server does not take"
        return invalid(f"{self._path} {why}", self._path, "unsupported_value")

    def _message(self, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            message = f"{self._path}.role must be {list_alternatives(_ROLES)}, not"
            raise invalid(f"{message} {show_value(role)}", f"{self._path}.role", "invalid_value")
        text = self._text(item, "content", _TEXT_PARTS)
        if role == "user":
            self._into.add_user(text, self._path)
        elif role == "assistant":
            self._into.add_answer(text, self._path)
        else:
            self._into.add_system(text, self._path)

    def _reasoning(self, item: dict[str, Any]) -> None:
        for name in ("content", "summary"):
            if item.get(name):
                text = self._text(item, name, _REASONING_PARTS)
                self._into.add_reasoning(text, self._path)
                return

    def _function_call(self, item: dict[str, Any]) -> None:
        self._call(item, self._string(item, "arguments"))

    def _custom_call(self, item: dict[str, Any]) -> None:
        self._call(item, _json({"input": self._string(item, "input")}))

    def _call(self, item: dict[str, Any], arguments: str) -> None:
        name = self._tools.chat_name(ToolName.of(item, self._path, item.get("namespace")))
        self._into.add_call(self._call_id(item), name, arguments, self._path)

    def _search_call(self, item: dict[str, Any]) -> None:
        if item.get("call_id") is None:
            return  # a search that OpenAI executed
        arguments = item.get("arguments")
        text = arguments if isinstance(arguments, str) else _json(arguments or {})
        name = self._tools.chat_name(ToolName(TOOL_SEARCH))
        self._into.add_call(self._call_id(item), name, text, self._path)

    def _output(self, item: dict[str, Any]) -> None:
        text = self._text(item, "output", _TEXT_PARTS, _LEFT_OUT)
        self._into.add_output(self._call_id(item), text, self._path)

    def _search_output(self, item: dict[str, Any]) -> None:
        if item.get("call_id") is None:
            return
        names = [self._tools.chat_name(name) for name in self._found]
        self._into.add_output(self._call_id(item), _json({"tools": names}), self._path)

    def _call_id(self, item: dict[str, Any]) -> str:
        value = item.get("call_id")
        if not isinstance(value, str) or not 1 <= len(value) <= 256:
            path = f"{self._path}.call_id"
            shown = show_value(value)
            raise invalid(f"{path} must be a string of 1 to 256 characters, not {shown}", path)
        return value

    def _string(self, item: dict[str, Any], name: str) -> str:
        value = item.get(name)
        if not isinstance(value, str):
            path = f"{self._path}.{name}"
            raise invalid(f"{path} must be a string, not {show_value(value)}", path)
        return value

    def _text(
        self,
        item: dict[str, Any],
        name: str,
        kinds: dict[str, str],
        left_out: dict[str, str] | None = None,
    ) -> str:
        """Return a string, or the texts of an array of parts, one per line; of null, none."""
        path, value = f"{self._path}.{name}", item.get(name)
        if name in item and value is None:
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            shown = show_value(value)
            raise invalid(f"{path} must be a string or an array of parts, not {shown}", path)
        texts = []
        for index, part in enumerate(value):
            texts.append(_part_text(part, f"{path}[{index}]", kinds, left_out or {}))
        return "\n".join(texts)


def _part_text(part: Any, path: str, kinds: dict[str, str], left_out: dict[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        message = f'{path} must be a part such as {{"type": "{next(iter(kinds))}", "text": "..."}}'
        raise invalid(message, path)
    if kind in left_out:
        return left_out[kind]
    if kind not in kinds:
        message = f"{path} is of type {show_value(kind)}; this server takes text only"
        raise invalid(message, path, "unsupported_value")
    text = part.get(kinds[kind])
    if not isinstance(text, str):
        inner = f"{path}.{kinds[kind]}"
        raise invalid(f"{inner} must be a string, not {show_value(text)}", inner)
    return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
