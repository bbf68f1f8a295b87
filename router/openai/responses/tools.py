"""The tools of ``/v1/responses`` as functions of a chat, and the way back.

    {"type": "namespace", "name": "a", "tools": [{"name": "b"}]}  -->  function a__b
    a call of a__b                                                -->  name "b", namespace "a"

Clients compare bare names and namespaces and never split a joined name, so that the way back is a
map which is made for each request. Tools that only OpenAI can execute are left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from router.common.errors import ApiError, invalid
from router.openai.bodies.field_types import show_value
from router.openai.bodies.tools import MAX_TOOLS

TOOL_SEARCH = "tool_search"
MAX_NAME_CHARS = 1024
_CHAT_NAME_CHARS = 64  # of functions in chats
_DIGEST_CHARS = 8
_DEFAULT_NAMESPACE = "functions"  # whose functions have bare names
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}

ToolKind = Literal["function", "custom", "tool_search"]


class ToolName(NamedTuple):
    """The name of a tool as the client writes it."""

    name: str
    namespace: str | None = None

    @classmethod
    def of(cls, entry: dict[str, Any], path: str, namespace: Any = None) -> ToolName:
        """Read ``entry["name"]``. Raises ApiError (400)."""
        name = entry.get("name")
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
            raise invalid(
                f"{path}.name must be a string of 1 to {MAX_NAME_CHARS} characters, not"
                f" {show_value(name)}",
                f"{path}.name",
            )
        if namespace is not None and not isinstance(namespace, str):
            shown = show_value(namespace)
            message = f"{path}.namespace must be a string, not {shown}"
            raise invalid(message, f"{path}.namespace")
        if not namespace or namespace == _DEFAULT_NAMESPACE:
            return cls(name)
        return cls(name, namespace[:MAX_NAME_CHARS])

    def for_chat(self) -> str:
        """Return the name of the function in chats: 1 to 64 letters, digits, '_' or '-'. A name
        that had to be changed ends with a digest of the whole one."""
        joined = self.name if self.namespace is None else f"{self.namespace}__{self.name}"
        clean = _NOT_IN_NAMES.sub("_", joined)
        if clean == joined and len(clean) <= _CHAT_NAME_CHARS:
            return clean
        return self.with_digest()

    def with_digest(self) -> str:
        """Return another name for chats, where the usual one belongs to another tool."""
        whole = "\0".join((self.namespace or "", self.name)).encode(errors="replace")
        digest = hashlib.sha256(whole).hexdigest()[:_DIGEST_CHARS]
        joined = self.name if self.namespace is None else f"{self.namespace}__{self.name}"
        return f"{_NOT_IN_NAMES.sub('_', joined)[: _CHAT_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


class KnownTool(NamedTuple):
    """A tool that the model may call."""

    kind: ToolKind
    name: ToolName
    path: str  # where the client sent it


class ToolSet:
    """All tools of one request. Filled by the codec, then read by the emitter."""

    def __init__(self) -> None:
        self.for_chat: list[dict[str, Any]] = []  # in the form of ChatBody.tools
        self._by_chat_name: dict[str, KnownTool] = {}
        self._chat_names: dict[ToolName, str] = {}

    def __len__(self) -> int:
        return len(self.for_chat)

    def find(self, chat_name: str) -> KnownTool:
        """Return the tool with this name in chats; an unknown one is a function of that name, as
        from a model whose output is not constrained."""
        found = self._by_chat_name.get(chat_name)
        return found or KnownTool("function", ToolName(chat_name), "tools")

    def chat_name(self, name: ToolName) -> str:
        """Return the name in chats, also that of a tool which is offered no longer."""
        return self._chat_names.get(name) or name.for_chat()

    def is_known(self, name: ToolName) -> bool:
        return name in self._chat_names

    def named(self, name: str) -> list[ToolName]:
        """Return the tools of all namespaces with this bare name."""
        return [known for known in self._chat_names if known.name == name]

    def path_of(self, index: int) -> str:
        """Return where the client sent the tool that is at ``index`` in ``for_chat``."""
        return self._by_chat_name[self.for_chat[index]["function"]["name"]].path

    def add_all(self, tools: Any, path: str) -> list[ToolName]:
        """Add an array of tools and return the names of those that can be called; of two tools with
        one name the first counts. Raises ApiError (400) for what is not a tool."""
        if not isinstance(tools, list):
            raise invalid(f"{path} must be an array, not {show_value(tools)}", path)
        names: list[ToolName] = []
        for index, tool in enumerate(tools):
            names += self._add(tool, f"{path}[{index}]")
        return names

    def _add(self, tool: Any, path: str) -> list[ToolName]:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise invalid(
                f'{path} must be a tool such as {{"type": "function", "name": "..."}}, not'
                f" {show_value(tool)}",
                path,
            )
        if kind == "namespace":
            return self._add_namespace(tool, path)
        if kind in ("function", "custom"):
            self._add_one(kind, ToolName.of(tool, path), tool, path)  # type: ignore[arg-type]
            return [ToolName.of(tool, path)]
        if kind == TOOL_SEARCH and tool.get("execution") == "client":
            self._add_one("tool_search", ToolName(TOOL_SEARCH), tool, path)
            return [ToolName(TOOL_SEARCH)]
        return []  # a tool that OpenAI executes

    def _add_namespace(self, tool: dict[str, Any], path: str) -> list[ToolName]:
        namespace = ToolName.of(tool, path).name
        inner = tool.get("tools")
        if not isinstance(inner, list):
            message = f"{path}.tools must be an array, not {show_value(inner)}"
            raise invalid(message, f"{path}.tools")
        names = []
        for index, entry in enumerate(inner):
            at = f"{path}.tools[{index}]"
            if not isinstance(entry, dict):
                raise invalid(f"{at} must be an object, not {show_value(entry)}", at)
            if entry.get("type") not in ("function", "custom"):
                continue
            name = ToolName.of(entry, at, namespace)
            self._add_one(entry["type"], name, entry, at)
            names.append(name)
        return names

    def _add_one(self, kind: ToolKind, name: ToolName, tool: dict[str, Any], path: str) -> None:
        if name in self._chat_names:
            return
        chat_name = name.for_chat()
        if chat_name in self._by_chat_name:
            chat_name = name.with_digest()
        if chat_name in self._by_chat_name:
            return  # a name that the client made to look like this one
        if len(self) == MAX_TOOLS:
            raise invalid(f"{path}: at most {MAX_TOOLS} tools are taken", path)
        self._chat_names[name] = chat_name
        self._by_chat_name[chat_name] = KnownTool(kind, name, path)
        self.for_chat.append(
            {"type": "function", "function": {"name": chat_name, **_function(kind, tool, path)}}
        )


def _function(kind: ToolKind, tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the fields of a chat's function, except its name."""
    description = _checked(tool, "description", str, path)
    if kind == "custom":
        format_ = _checked(tool, "format", dict, path)
        text = "\n\n".join([*([description] if description else []), *_format_text(format_)])
        return {"description": text, "parameters": _custom_parameters(), "strict": None}
    parameters = _checked(tool, "parameters", dict, path)
    strict = _checked(tool, "strict", bool, path) if kind == "function" else None
    if parameters is None and kind == "tool_search":
        parameters = _ANY_ARGUMENTS
    return {"description": description, "parameters": parameters, "strict": strict}


def _checked(tool: dict[str, Any], field: str, kind: type, path: str) -> Any:
    value = tool.get(field)
    if value is not None and not isinstance(value, kind):
        shown = {str: "a string", dict: "an object", bool: "true or false"}[kind]
        raise invalid(f"{path}.{field} must be {shown}, not {show_value(value)}", f"{path}.{field}")
    return value


def _custom_parameters() -> dict[str, Any]:
    text = {"type": "string", "description": "The whole input of the tool, as plain text"}
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def _format_text(format_: dict[str, Any] | None) -> Iterator[str]:
    """Yield the sentence that tells the model of a custom tool's grammar: it applies to the text
    inside a JSON string, where no grammar can be enforced."""
    definition = (format_ or {}).get("definition")
    if isinstance(definition, str):
        syntax = (format_ or {}).get("syntax")
        kind = syntax if syntax in ("lark", "regex") else "given"
        yield f"The input must match this {kind} grammar:\n{definition}"


def tool_choice_for_chat(choice: Any, tools: ToolSet, *, sent: bool) -> Any:
    """Return ``tool_choice`` of the chat; None: it is left out. ``sent``: whether the request had
    any tools. Raises ApiError (400) where a tool is forced that this server cannot offer."""
    if choice is None or isinstance(choice, str):
        return _mode_for_chat(choice, tools, sent=sent)
    if not isinstance(choice, dict) or not isinstance(choice.get("type"), str):
        message = f"tool_choice must be a string or an object with a type, not {show_value(choice)}"
        raise invalid(message, "tool_choice", "invalid_value")
    if choice["type"] == "allowed_tools":
        return _allowed_for_chat(choice, tools)
    if choice["type"] not in ("function", "custom", TOOL_SEARCH):
        raise _not_executed(choice["type"])
    return _named(_resolve(choice, tools, "tool_choice"), tools)


def _mode_for_chat(choice: str | None, tools: ToolSet, *, sent: bool) -> str | None:
    if choice not in (None, "none", "auto", "required"):
        message = f"tool_choice must be 'none', 'auto' or 'required', not {show_value(choice)}"
        raise invalid(message, "tool_choice", "invalid_value")
    if len(tools):
        return choice
    if choice == "required":
        raise _not_executed("required") if sent else _without_tools()
    return None


def _without_tools() -> ApiError:
    return invalid("tool_choice is only allowed with tools", "tool_choice")


def _not_executed(what: str) -> ApiError:
    return invalid(
        f"tool_choice {show_value(what)} forces a tool, but this server executes none itself:"
        " send tools of type 'function', 'custom' or 'namespace'",
        "tool_choice",
        "unsupported_parameter",
    )


def _allowed_for_chat(choice: dict[str, Any], tools: ToolSet) -> Any:
    mode, allowed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list):
        message = "tool_choice must have a mode ('auto' or 'required') and an array of tools"
        raise invalid(message, "tool_choice", "invalid_value")
    names: dict[ToolName, None] = {}
    for index, entry in enumerate(allowed):
        path = f"tool_choice.tools[{index}]"
        if not isinstance(entry, dict):
            raise invalid(f"{path} must be an object, not {show_value(entry)}", path)
        if entry.get("type") in ("function", "custom", TOOL_SEARCH):
            names[_resolve(entry, tools, path)] = None
    if not names:
        if mode == "required":
            raise _not_executed("required")
        return "none" if len(tools) else None
    chosen = [_named(name, tools) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}


def _named(name: ToolName, tools: ToolSet) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tools.chat_name(name)}}


def _resolve(entry: dict[str, Any], tools: ToolSet, path: str) -> ToolName:
    """Return the tool that ``entry`` names, by its bare name where that is the only one."""
    if entry["type"] == TOOL_SEARCH:
        name = ToolName(TOOL_SEARCH)
    else:
        name = ToolName.of(entry, path, entry.get("namespace"))
    if tools.is_known(name):
        return name
    others = tools.named(name.name) if name.namespace is None else []
    if len(others) != 1:
        message = f"{path} {show_value(name.name)} is not among tools"
        raise invalid(message, f"{path}.name")
    return others[0]
