"""Tools that a client offers, and its wishes about their use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag

from router.common.errors import invalid
from router.openai.bodies.strict_types import FunctionName, Strict, one_of

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; none: no parameters
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """As templates expect it."""
        function = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": self.function.parameters,
        }
        return {
            "type": "function",
            "function": {key: value for key, value in function.items() if value is not None},
        }


Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class FunctionByName(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionByName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedToolChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_MODES = ("none", "auto", "required")


def _choice_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "=mode" if value in _MODES else None
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"={kind}" if kind in ("function", "allowed_tools") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("=mode")]
    | Annotated[NamedTool, Tag("=function")]
    | Annotated[AllowedToolChoice, Tag("=allowed_tools")],
    Discriminator(
        _choice_tag,
        custom_error_type="baton",
        custom_error_message="{message}",
        custom_error_context={
            "message": f"must be {one_of(_MODES)}, or name a function"
            ' ({"type": "function", "function": {"name": "..."}})',
            "code": "invalid_value",
            "tag": "type",
        },
    ),
]

Mode = Literal["none", "auto", "required", "named"]


class ToolWish(NamedTuple):
    """The fields of a body, as they came."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice | None = None  # None: auto with tools, else none
    parallel: bool = True


class Decision(NamedTuple):
    """What a wish comes to. ``callable``: places in ``tools`` of those that may be called."""

    mode: Mode
    callable: tuple[int, ...]


def decide(wish: ToolWish) -> Decision:
    """Raises ApiError (400) for a choice among tools that are not there, or for two of a name."""
    names = [tool.function.name for tool in wish.tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            field = f"tools[{place}].function.name"
            raise invalid(f"{field} {name!r} is taken by another tool", field)
    everything = tuple(range(len(names)))
    choice = wish.choice
    if not names:
        if choice not in (None, "none"):
            raise invalid("tool_choice is only allowed with tools", "tool_choice")
        return Decision("none", ())
    if choice is None or isinstance(choice, str):
        return Decision(choice or "auto", everything)
    if isinstance(choice, NamedTool):
        return Decision("named", (_find(choice, names, "tool_choice.function.name"),))
    allowed = choice.allowed_tools
    field = "tool_choice.allowed_tools.tools"
    places = {
        _find(tool, names, f"{field}[{at}].function.name") for at, tool in enumerate(allowed.tools)
    }
    return Decision(allowed.mode, tuple(sorted(places)))


def _find(tool: NamedTool, names: list[str], field: str) -> int:
    try:
        return names.index(tool.function.name)
    except ValueError:
        raise invalid(f"{field} {tool.function.name!r} is not among tools", field) from None
