"""The grammar of an output with tool calls, in the syntax of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from router.common.errors import invalid
from router.openai.bodies.closed_objects import close_objects
from router.openai.bodies.grammar_source import GrammarSource, lark_literal, schema_source
from router.openai.bodies.tools import NO_PARAMETERS, Tool
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.tool_syntax import CallableTool, ToolCallSyntax

MAX_CALLS = 16
"""Most calls in one answer, so that a model that must call a tool comes to an end."""

_ARGUMENTS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as in the models' training data."""

_ANY = r"/(.|\n)*/"


def callable_tool(tool: Tool, index: int) -> CallableTool:
    """Return a tool with the grammar of its arguments. Without ``strict``, keywords that a grammar
    cannot express are ignored, as with OpenAI. Raises ApiError (400)."""
    field = f"tools[{index}].function.parameters"
    given = tool.function.parameters
    schema: Mapping[str, Any] = given if given else NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise invalid(f"{field} must be a schema of type 'object'", field, "invalid_schema")
    schema = {"type": "object", **schema}
    options = {**_ARGUMENTS, "lenient": not tool.function.strict, "coerce_one_of": True}
    source = schema_source(schema, field, options)
    return CallableTool(tool.function.name, close_objects(schema), source)


class ToolCallGrammar:
    """Builds grammars for one request, which may call ``tools``."""

    def __init__(
        self,
        syntax: ToolCallSyntax,
        vocabulary: AddedTokenVocabulary,
        tools: Sequence[CallableTool],
    ) -> None:
        self._syntax = syntax
        self._vocabulary = vocabulary
        self._tools = tools

    def required(self, *, max_calls: int) -> str:
        """Return the grammar of one to ``max_calls`` calls without other text."""
        return _compiled(self.required_rules(max_calls=max_calls))

    def auto(self, *, max_calls: int, content: GrammarSource | None = None) -> str:
        """Return the grammar of free text that may end in calls; or of either ``content`` or
        calls."""
        return _compiled(self.auto_rules(max_calls=max_calls, content=content))

    def required_rules(self, *, max_calls: int) -> list[str]:
        """Return the rules of ``required``, that of ``start`` first."""
        return [f"start: {self._begin()} calls", *self._calls(max_calls)]

    def auto_rules(self, *, max_calls: int, content: GrammarSource | None = None) -> list[str]:
        """Return the rules of ``auto``, that of ``start`` first."""
        begin = self._begin()
        if content is not None:
            assert content.lark is not None
            rules = [f"start: content | {begin} calls", f"content: {content.lark}"]
        elif not self._syntax.trigger:
            rules = [
                f"start: TEXT | {begin} calls",
                f"TEXT: {_ANY} & ~{self._syntax.call_start}",
            ]
        elif self._syntax.trigger in self._vocabulary.control:
            rules = [f"start: text | text {begin} calls", self._text()]
        else:
            rules = [
                f"start: text | head {self._begin_after_trigger()} calls",
                self._head(),
                self._text(),
            ]
        return [*rules, *self._calls(max_calls)]

    def _calls(self, max_calls: int) -> list[str]:
        s = self._syntax
        between, end = self._vocabulary.literal(s.between), self._vocabulary.literal(s.end)
        more = f" ({between} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        names = [f"call_{i}" for i in range(len(self._tools))]
        rules = [f"calls: call{more} {end}", f"call: {' | '.join(names)}"]
        if self._begins_in_call():
            firsts = " | ".join(f"{name}_first" for name in names)
            rules = [f"calls: first_call{more} {end}", f"first_call: {firsts}", rules[1]]
        for rule, tool in zip(names, self._tools, strict=True):
            rules += s.call_rules(rule, tool, self._vocabulary)
        return [*rules, *s.shared_rules(self._vocabulary)]

    def _begin(self) -> str:
        """Return Lark for what stands before the first call."""
        before = self._vocabulary.control.get(self._syntax.before)
        optional = f"<[{before}]>? " if before is not None else ""
        if self._begins_in_call():
            return optional
        return optional + self._vocabulary.literal(self._syntax.begin)

    def _begins_in_call(self) -> bool:
        """Return whether ``begin`` is a part of the first call's rule."""
        return bool(self._syntax.begin) and not self._syntax.trigger

    def _text(self) -> str:
        """Return the rules for any text and visible control tokens, without marks of calls."""
        ids = self._visible()
        among = f"text: TEXT (<[{ids}]> TEXT)*" if ids else "text: TEXT"
        # A mark that is spelled in letters is not a mark.
        spelled = re.escape(self._syntax.trigger).replace("/", r"\/")
        return f"{among}\nTEXT: {_ANY} & ~/(.|\\n)*{spelled}(.|\\n)*/"

    def _head(self) -> str:
        """Return the rules for text up to a spelled trigger; only a lazy lexeme stops there."""
        ids = self._visible()
        before = f"(TEXT <[{ids}]>)* " if ids else ""
        trigger = lark_literal(self._syntax.trigger)
        return f"head: {before}opening\nopening[lazy]: TEXT {trigger}"

    def _begin_after_trigger(self) -> str:
        return self._vocabulary.literal(self._syntax.begin.removeprefix(self._syntax.trigger))

    def _visible(self) -> str:
        """Return the ids of the visible control tokens, without the marks of calls."""
        marks = [t for t in self._vocabulary.control if t in self._syntax.marks]
        return ",".join(map(str, self._vocabulary.visible_ids(without=marks)))


def _compiled(rules: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("\n".join(rules) + "\n")
