"""The grammar of an output with tool calls, in the syntax of the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher
from tokenizers import Tokenizer

from router.common.errors import invalid
from router.openai.bodies.grammar_source import GrammarSource, lark_literal, schema_source
from router.openai.bodies.tools import NO_PARAMETERS, Tool
from router.openai.tool_calls.tool_syntax import ToolCallSyntax

MAX_CALLS = 16
"""Most calls in one answer, so that a model that must call a tool comes to an end."""

_ARGUMENTS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as in the models' training data."""

_ANY = r"/(.|\n)*/"


def arguments_source(tool: Tool, index: int) -> GrammarSource:
    """Return the grammar of a tool's arguments. Without ``strict``, keywords that a grammar cannot
    express are ignored, as with OpenAI. Raises ApiError (400)."""
    field = f"tools[{index}].function.parameters"
    given = tool.function.parameters
    schema: Mapping[str, Any] = given if given else NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise invalid(f"{field} must be a schema of type 'object'", field, "invalid_schema")
    options = {**_ARGUMENTS, "lenient": not tool.function.strict, "coerce_one_of": True}
    return schema_source({"type": "object", **schema}, field, options)


class ToolCallGrammar:
    """Builds grammars for one request; ``arguments`` has each callable name with its grammar."""

    def __init__(
        self,
        syntax: ToolCallSyntax,
        vocabulary: AddedTokenVocabulary,
        arguments: Sequence[tuple[str, GrammarSource]],
    ) -> None:
        self._syntax = syntax
        self._vocabulary = vocabulary
        self._arguments = arguments

    def required(self, *, max_calls: int) -> str:
        """Return the grammar of one to ``max_calls`` calls without other text."""
        return self._grammar([f"start: {self._literal(self._syntax.begin)} calls"], max_calls)

    def auto(self, *, max_calls: int, content: GrammarSource | None = None) -> str:
        """Return the grammar of free text that may end in calls; or of either ``content`` or
        calls."""
        begin = self._literal(self._syntax.begin)
        if content is not None:
            assert content.lark is not None
            rules = [f"start: content | {begin} calls", f"content: {content.lark}"]
        elif not self._syntax.trigger:
            rules = ["start: TEXT | calls", f"TEXT: {_ANY} & ~{self._call_start()}"]
        elif self._syntax.trigger in self._vocabulary.control:
            rules = [f"start: text | text {begin} calls", self._text()]
        else:
            rules = [
                f"start: text | head {self._begin_after_trigger()} calls",
                self._head(),
                self._text(),
            ]
        return self._grammar(rules, max_calls)

    def _grammar(self, rules: list[str], max_calls: int) -> str:
        s = self._syntax
        more = f" ({self._literal(s.between)} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
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
        """Return the rules for any text and visible control tokens, without marks of calls."""
        ids = self._visible()
        among = f"text: TEXT (<[{ids}]> TEXT)*" if ids else "text: TEXT"
        spelled = re.escape(self._syntax.trigger).replace(
            "/", r"\/"
        )  # a mark spelled in letters is not a mark
        return f"{among}\nTEXT: {_ANY} & ~/(.|\\n)*{spelled}(.|\\n)*/"

    def _head(self) -> str:
        """Return the rules for text up to a spelled trigger; only a lazy lexeme stops there."""
        ids = self._visible()
        before = f"(TEXT <[{ids}]>)* " if ids else ""
        trigger = lark_literal(self._syntax.trigger)
        return f"head: {before}opening\nopening[lazy]: TEXT {trigger}"

    def _begin_after_trigger(self) -> str:
        return self._literal(self._syntax.begin.removeprefix(self._syntax.trigger))

    def _visible(self) -> str:
        """Return the ids of the visible control tokens, without the marks of calls."""
        s = self._syntax
        marks = [t for t in self._vocabulary.control if t in s.begin + s.between + s.end]
        return ",".join(map(str, self._vocabulary.visible_ids(without=marks)))

    def _call_start(self) -> str:
        return r'/\s*\{\s*"name"\s*:(.|\n)*/'


class AddedTokenVocabulary(NamedTuple):
    """The added tokens of a tokenizer, as grammars see them.

    llguidance treats an added token as a control token if the tokenizer marks it as special or if
    it looks like ``<...>``. Text never matches a control token; a grammar names it by its id.
    """

    control: dict[str, int]  # control token -> id
    special: frozenset[str]  # those of them that a detokenizer skips

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AddedTokenVocabulary:
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(t.content for t in added.values() if t.special)
        control = {
            t.content: i for i, t in added.items() if t.special or re.fullmatch("<.*>", t.content)
        }
        return cls(control, special)

    def literal(self, text: str) -> str:
        """Return Lark for ``text``, with its control tokens by their ids."""
        if not self.control:
            return lark_literal(text)
        longest = sorted(self.control, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest))})", text)
        return " ".join(
            f"<[{self.control[piece]}]>" if piece in self.control else lark_literal(piece)
            for piece in pieces
            if piece
        )

    def visible_ids(self, without: Collection[str]) -> list[int]:
        """Return the sorted ids of control tokens that a detokenizer keeps, such as ``<think>``."""
        return sorted(
            i for t, i in self.control.items() if t not in self.special and t not in without
        )
