"""The tools of a request, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag

from router.common.errors import invalid
from router.openai.bodies.field_types import FunctionName, StrictModel, list_alternatives

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFunction(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; None: no parameters
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: ToolFunction
    cache_control: dict[str, Any] | None = None  # has no effect: prefixes are cached in any case

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": self.function.parameters,
        }
        return {
            "type": "function",
            "function": {key: value for key, value in function.items() if value is not None},
        }


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(StrictModel):
    name: FunctionName


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedToolChoice(StrictModel):
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
            "message": f"must be {list_alternatives(_MODES)}, or name a function"
            ' ({"type": "function", "function": {"name": "..."}})',
            "code": "invalid_value",
            "tag": "type",
        },
    ),
]

ToolMode = Literal["none", "auto", "required", "named"]


class ToolOptions(NamedTuple):
    """The fields of a body about tools."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice | None = None  # None: auto with tools, else none
    parallel: bool = True


class ToolChoiceDecision(NamedTuple):
    """Whether tools may or must be called; ``callable`` has the indexes in ``tools`` of those."""

    mode: ToolMode
    callable: tuple[int, ...]


def decide_tool_choice(options: ToolOptions) -> ToolChoiceDecision:
    """Decide about tool calls. Raises ApiError (400) for an unknown tool or a duplicate name."""
    names = [tool.function.name for tool in options.tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            field = f"tools[{index}].function.name"
            raise invalid(f"{field} {name!r} is taken by another tool", field)
    everything = tuple(range(len(names)))
    choice = options.choice
    if not names:
        if choice not in (None, "none", "auto"):  # clients send it whether or not they have tools
            raise invalid("tool_choice is only allowed with tools", "tool_choice")
        return ToolChoiceDecision("none", ())
    if choice is None or isinstance(choice, str):
        return ToolChoiceDecision(choice or "auto", everything)
    if isinstance(choice, NamedTool):
        return ToolChoiceDecision("named", (_find(choice, names, "tool_choice.function.name"),))
    allowed = choice.allowed_tools
    field = "tool_choice.allowed_tools.tools"
    places = {
        _find(tool, names, f"{field}[{at}].function.name") for at, tool in enumerate(allowed.tools)
    }
    return ToolChoiceDecision(allowed.mode, tuple(sorted(places)))


def _find(tool: NamedTool, names: list[str], field: str) -> int:
    try:
        return names.index(tool.function.name)
    except ValueError:
        raise invalid(f"{field} {tool.function.name!r} is not among tools", field) from None
