"""The grammar of an output with tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

from router.common.errors import invalid
from router.openai.bodies.grammar_source import Source, quoted, schema_source
from router.openai.bodies.tools import NO_PARAMETERS, Tool
from router.openai.chat.control_tokens import AddedTokens

# MERGED router.chat.syntax
# How models write tool calls. The chat template shows which way its model was trained on.
#
# begin OPEN name MIDDLE {arguments} CLOSE  between OPEN ... CLOSE  end


class Syntax(NamedTuple):
    name: str
    trigger: str  # in free text: here calls begin; empty: only the start of a text can be a call
    begin: str  # before the first call, the trigger included
    between: str
    end: str
    open: str
    middle: str
    close: str
    short_ids: bool = False  # ids of calls have nine letters and digits, or the template refuses


HERMES = Syntax(
    "hermes",
    trigger="<tool_call>",
    begin="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
)
"""Nous Hermes 2 Pro, Qwen 2.5 and 3."""

LLAMA3_JSON = Syntax(
    "llama3_json",
    trigger="",
    begin="",
    between="; ",
    end="",
    open='{"name": "',
    middle='", "parameters": ',
    close="}",
)
"""Llama 3.1 and later: the whole answer is a call."""

MISTRAL = Syntax(
    "mistral",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    between=", ",
    end="]",
    open='{"name": "',
    middle='", "arguments": ',
    close="}",
    short_ids=True,
)
"""Mistral's tokenizers up to v7."""

MISTRAL_ARGS = Syntax(
    "mistral_args",
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    end="",
    open="",
    middle="[ARGS]",
    close="",
    short_ids=True,
)
"""Mistral's tokenizers from v11 on."""

SYNTAXES = {s.name: s for s in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS)}


def detect(template: str) -> Syntax:
    """By the marks that a template writes; HERMES where it writes none."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if re.search(r'\\?"parameters\\?"\s*:', template):
        return LLAMA3_JSON
    return HERMES


MAX_CALLS = 16
"""In one answer, so that a model that must call something comes to an end."""

_ARGUMENTS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as in what models were trained on."""


def parameters(tool: Tool, place: int) -> Source:
    """The arguments of a tool. Without ``strict``, keywords that no grammar can hold are left to
    the model, as with OpenAI. Raises ApiError (400)."""
    field = f"tools[{place}].function.parameters"
    given = tool.function.parameters
    schema: Mapping[str, Any] = given if given else NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise invalid(f"{field} must be a schema of type 'object'", field, "invalid_schema")
    options = {**_ARGUMENTS, "lenient": not tool.function.strict, "coerce_one_of": True}
    return schema_source({"type": "object", **schema}, field, options)


class CallGrammar:
    """``arguments``: a grammar for each name that may be called."""

    def __init__(
        self, syntax: Syntax, vocabulary: AddedTokens, arguments: Sequence[tuple[str, Source]]
    ) -> None:
        self._syntax = syntax
        self._vocabulary = vocabulary
        self._arguments = arguments

    def required(self, *, most: int) -> str:
        """One to ``most`` calls, and nothing else."""
        return self._grammar([f"start: {self._literal(self._syntax.begin)} calls"], most)

    def auto(self, *, most: int, content: Source | None = None) -> str:
        """Free text, or ``content``; calls at its end, or in place of ``content``."""
        begin = self._literal(self._syntax.begin)
        if content is not None:
            assert content.lark is not None
            rules = [f"start: content | {begin} calls", f"content: {content.lark}"]
        elif not self._syntax.trigger:
            rules = ["start: TEXT | calls", f"TEXT: {_ANY} & ~{self._call_start()}"]
        elif self._syntax.trigger in self._vocabulary.control:
            rules = [f"start: text | text {begin} calls", self._text()]
        else:
            rules = [f"start: text | head {self._rest()} calls", self._head(), self._text()]
        return self._grammar(rules, most)

    def _grammar(self, rules: list[str], most: int) -> str:
        s = self._syntax
        more = f" ({self._literal(s.between)} call){{0,{most - 1}}}" if most > 1 else ""
        names = [f"call_{i}" for i in range(len(self._arguments))]
        rules += [
            f"calls: call{more} {self._literal(s.end)}",
            f"call: {' | '.join(names)}",
            *(
                f"{rule}: {self._literal(s.open + name + s.middle)} {source.lark}"
                f" {self._literal(s.close)}"
                for rule, (name, source) in zip(names, self._arguments, strict=True)
            ),
        ]
        return LLMatcher.grammar_from_lark("\n".join(rules) + "\n")

    def _literal(self, text: str) -> str:
        return self._vocabulary.literal(text) if text else ""

    def _text(self) -> str:
        """Any text, and the control tokens that a reader sees, but no marks of calls."""
        ids = self._visible()
        among = f"text: TEXT (<[{ids}]> TEXT)*" if ids else "text: TEXT"
        spelled = re.escape(self._syntax.trigger).replace("/", r"\/")  # a mark in letters is none
        return f"{among}\nTEXT: {_ANY} & ~/(.|\\n)*{spelled}(.|\\n)*/"

    def _head(self) -> str:
        """Any text up to a trigger in letters. A lexeme that is not lazy would run past it."""
        ids = self._visible()
        before = f"(TEXT <[{ids}]>)* " if ids else ""
        trigger = quoted(self._syntax.trigger)
        return f"head: {before}opening\nopening[lazy]: TEXT {trigger}"

    def _rest(self) -> str:
        return self._literal(self._syntax.begin.removeprefix(self._syntax.trigger))

    def _visible(self) -> str:
        """Ids of the control tokens that a reader sees, without the marks of calls."""
        s = self._syntax
        marks = [t for t in self._vocabulary.control if t in s.begin + s.between + s.end]
        return ",".join(map(str, self._vocabulary.visible(without=marks)))

    def _call_start(self) -> str:
        return r'/\s*\{\s*"name"\s*:(.|\n)*/'


_ANY = r"/(.|\n)*/"
