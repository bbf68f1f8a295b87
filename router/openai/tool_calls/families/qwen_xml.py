"""Qwen3-Coder, Qwen 3.5 and later, and others with the same tags: arguments are untyped text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A string stands as it is, everything else as JSON. Templates show earlier booleans and nulls as JSON
or as Python writes them, so models do both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import regex_to_lark

from protocol.sampling_params import MAX_GRAMMAR_BYTES
from router.common.errors import ApiError, invalid
from router.openai.bodies.grammar_source import schema_lark
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.argument_schema import (
    ArgumentSchema,
    Property,
    Schema,
    has_values,
    value_types,
    values_of,
)
from router.openai.tool_calls.families.qwen_xml_parser import MAX_KEY, XmlCallParser
from router.openai.tool_calls.tool_parser import ToolParser
from router.openai.tool_calls.tool_syntax import CallableTool, ToolSchemas

_CLOSE = "\n</parameter>\n"
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
    "coerce_one_of": True,
}
_ANY = r"/(.|\n)*/"
_FORBIDDEN = (
    r"<\/parameter>\s{0,8}<(parameter=|function=|\/function>|\/?tool_call>)|\n<parameter=|"
    r"<\/function>\s{0,8}<(function=|\/?tool_call>)|<\/tool_call>\s{0,8}<tool_call>"
)
"""What the parser takes for the end of a value."""

_WORDS: dict[str, tuple[str, ...]] = {
    "boolean": ("true", "false", "True", "False"),
    "null": ("null", "None"),
}


class XmlCalls:
    """The syntax of Qwen3-Coder."""

    name = "qwen3_coder"
    trigger = "<tool_call>"
    begin = "<tool_call>\n"
    between = "\n</tool_call>\n<tool_call>\n"
    end = "\n</tool_call>"
    before = ""
    call_start = ""
    marks = f"{begin}{end}<function=\n<parameter=\n</parameter>\n</function>"

    def is_written_by(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def call_rules(
        self, rule: str, tool: CallableTool, vocabulary: AddedTokenVocabulary
    ) -> list[str]:
        return _CallRules(rule, tool, vocabulary).rules()

    def shared_rules(self, vocabulary: AddedTokenVocabulary) -> list[str]:
        return [
            f"value[lazy]: VALUE_TEXT {json.dumps(_CLOSE)}",
            rf"VALUE_TEXT: {_ANY} & ~/(.|\n)*({_FORBIDDEN})(.|\n)*/",
        ]

    def new_parser(self, schemas: ToolSchemas, *, forced: bool = False) -> ToolParser:
        return XmlCallParser(schemas, forced=forced)


QWEN3_CODER = XmlCalls()


class _CallRules:
    """Makes the rules of one call."""

    def __init__(self, rule: str, tool: CallableTool, vocabulary: AddedTokenVocabulary) -> None:
        self._rule = rule
        self._tool = tool
        self._literal = vocabulary.literal
        self._schema = ArgumentSchema(tool.schema)
        self._further: list[str] = []
        self._size = 0

    def rules(self) -> list[str]:
        shape = self._schema.shape(self._tool.schema)
        parts = [self._literal(f"<function={self._tool.name}>\n")]
        parts += [self._property(place, one) for place, one in enumerate(shape.properties)]
        if shape.extra is not None:
            value = self._value(f"{self._rule}_extra", shape.extra)
            parts.append(rf'("<parameter=" /[^>\n<]{{1,{MAX_KEY}}}/ ">\n" {value})*')
        parts.append(self._literal("</function>"))
        return [f"{self._rule}: {' '.join(parts)}", *self._further]

    def _property(self, place: int, one: Property) -> str:
        if not re.fullmatch(rf"[^>\n]{{1,{MAX_KEY}}}", one.name):
            raise self._refusal(
                f"this model's calls cannot name a property {one.name[:80]!r}: a name has at most"
                f" {MAX_KEY} characters and no '>' or line break",
                "invalid_schema",
            )
        key = self._literal(f"<parameter={one.name}>\n")
        written = f"{key} {self._value(f'{self._rule}_{place}', one.schema)}"
        return written if one.required else f"({written})?"

    def _value(self, name: str, schema: Any) -> str:
        """Return an expression for a value and what closes it; ``name``: for a rule of its own."""
        variants = self._schema.variants(schema) or [{}]
        texts = [one for one in variants if self._is_text(one)]
        others = [one for one in variants if not self._is_text(one)]
        numeric = any(self._types(one) & {"integer", "number"} for one in others)
        if any(not _limits(one) for one in texts) or (texts and numeric):
            return "value"
        options = [text for one in others for text in self._typed(one)]
        for place, one in enumerate(texts):
            self._further.append(_limited_text(f"{name}_{place}", _limits(one)))
            options.append(f"{name}_{place}")
        self._further.append(f"{name}: {' | '.join(dict.fromkeys(options))}")
        return name

    def _types(self, variant: Schema) -> frozenset[str]:
        return self._schema.variant_types(variant)

    def _is_text(self, variant: Schema) -> bool:
        """Return whether any string is a value, within its limits."""
        types = self._types(variant)
        return not has_values(variant) and (not types or "string" in types)

    def _typed(self, variant: Schema) -> Iterator[str]:
        """Yield the alternatives of a value that is not free text."""
        if has_values(variant):
            for value in values_of(variant):
                for text in _spellings(value):
                    yield self._literal(text + _CLOSE)
            return
        types = sorted(self._types(variant))
        for kind in types:
            for word in _WORDS.get(kind, ()):
                yield self._literal(word + _CLOSE)
        rest = [kind for kind in types if kind not in _WORDS]
        if rest:
            definitions = self._schema.definitions_for(variant)
            lark = schema_lark({**definitions, **variant, "type": rest}, _JSON)
            self._size += len(lark)
            if self._size > MAX_GRAMMAR_BYTES:
                raise self._refusal("its definitions are too long", "schema_too_large")
            yield f"{lark} {self._literal(_CLOSE)}"

    def _refusal(self, why: str, code: str) -> ApiError:
        field = self._tool.source.field
        return invalid(f"{field}: {why}", field, code)


def _spellings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if value is None or isinstance(value, bool):
        return (json.dumps(value), str(value))
    return (json.dumps(value, ensure_ascii=False),)


def _limits(schema: Schema) -> list[str]:
    """Return terminals that a string must match; none where any text fits."""
    if value_types(schema) != {"string"}:
        return []
    lengths, pattern = _lengths(schema), _raw_pattern(schema)
    terminals = [rf"/(.|\n){{{lengths}}}/"] if lengths else []
    return [*terminals, f"/{pattern}/"] if pattern else terminals


def _limited_text(name: str, terminals: list[str]) -> str:
    """Return the rules of a string with bounds on its length or a pattern."""
    text = f"{name}_text".upper()
    both = " & ".join(["VALUE_TEXT", *terminals])
    return f"{name}[lazy]: {text} {json.dumps(_CLOSE)}\n{text}: {both}"


def _lengths(schema: Schema) -> str:
    """Return the bounds on the length as in a regex; empty: none."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    least = least if isinstance(least, int) and least > 0 else 0
    most = most if isinstance(most, int) and most >= least else None
    if not least and most is None:
        return ""
    return f"{least},{'' if most is None else most}"


_PLAIN_PATTERN = re.compile(
    r"\^?(?:\\[dws.+*?()\[\]{}/|^$-]|\[\^?(?:\\.|[^\\\]\[])+\]|[^\\^$|])*+\$?"
)
"""A pattern whose anchors stand at its ends and which has no alternatives: others are not
enforced."""


def _raw_pattern(schema: Schema) -> str:
    """Return a pattern for a whole text, in Lark's form; empty where none is enforced."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not _PLAIN_PATTERN.fullmatch(pattern) or "(?" in pattern:
        return ""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) is not None
    whole = pattern[begins : len(pattern) - ends]
    any_text = r"(.|\n)*"
    lark = str(regex_to_lark(whole, "dw"))
    return f"{'' if begins else any_text}{lark}{'' if ends else any_text}"
