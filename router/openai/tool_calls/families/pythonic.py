"""Llama 3.2 and 4 with templates of this kind: the whole answer is a list of Python calls.

    [name(key="text", n=1, exact=True), other()]

Strings, lists and dictionaries are constrained to what is both Python and JSON; an argument that is
true, false or null is written as Python does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from protocol.sampling_params import MAX_GRAMMAR_BYTES
from router.common.errors import ApiError, invalid
from router.openai.bodies.grammar_source import schema_lark
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.argument_schema import ArgumentSchema, Schema, has_values, values_of
from router.openai.tool_calls.families.pythonic_parser import (
    MAX_KEY,
    PYTHON_TAG,
    PythonicCallParser,
)
from router.openai.tool_calls.tool_parser import ToolParser
from router.openai.tool_calls.tool_syntax import CallableTool, ToolSchemas

_WORDS = {"boolean": ("True", "False"), "null": ("None",)}
_SPELLED = {True: "True", False: "False", None: "None"}
_NAMED = re.compile(rf"[a-zA-Z_][a-zA-Z0-9_.-]{{0,{MAX_KEY - 1}}}")
_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
_ANY = {"type": ["array", "number", "object", "string"]}
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
    "coerce_one_of": True,
}
_SHOWN = re.compile(
    r"""\[func_name1\(|call(?:\.function|\['function'\])?(?:\.name|\['name'\])\s*[+~]\s*['"]\("""
)


class PythonicCalls:
    """The syntax of a list of Python calls."""

    name = "pythonic"
    trigger = ""
    begin = "["
    between = ", "
    end = "]"
    before = PYTHON_TAG
    marks = ""
    call_start = r"/\s*\[\s*[a-zA-Z0-9_.-]+\s*\((.|\n)*/"

    def is_written_by(self, template: str) -> bool:
        return _SHOWN.search(template) is not None

    def call_rules(
        self, rule: str, tool: CallableTool, vocabulary: AddedTokenVocabulary
    ) -> list[str]:
        return _CallRules(rule, tool, vocabulary).rules()

    def shared_rules(self, vocabulary: AddedTokenVocabulary) -> list[str]:
        return []

    def new_parser(self, schemas: ToolSchemas, *, forced: bool = False) -> ToolParser:
        return PythonicCallParser(forced=forced)


PYTHONIC = PythonicCalls()


class _CallRules:
    """Makes the rules of one call: ``rule``_N is what may come from argument N on while there is
    none yet, and ``rule``_mN after another one."""

    def __init__(self, rule: str, tool: CallableTool, vocabulary: AddedTokenVocabulary) -> None:
        self._rule = rule
        self._tool = tool
        self._literal = vocabulary.literal
        self._schema = ArgumentSchema(tool.schema)
        self._size = 0

    def rules(self) -> list[str]:
        rule, shape = self._rule, self._schema.shape(self._tool.schema)
        head = f"{self._tool.name}("
        rules = [f'{rule}: {self._literal(head)} {rule}_0 ")"']
        rules.append(f'{rule}_first: {self._literal(PYTHONIC.begin + head)} {rule}_0 ")"')
        for place, one in enumerate(shape.properties):
            pair = f"{self._key(one.name)} {self._value(one.schema)}"
            rest, more = f"{rule}_m{place + 1}", f"{rule}_{place + 1}"
            further = f'", " {rule}_p{place}'
            rules += [
                f"{rule}_p{place}: {pair}",
                f"{rule}_{place}: {rule}_p{place} {rest}" + ("" if one.required else f" | {more}"),
                f"{rule}_m{place}: {further if one.required else f'({further})?'} {rest}",
            ]
        last, extra = len(shape.properties), ""
        if shape.extra is not None:
            extra = f"{rule}_extra"
            rules.append(f'{extra}: {_ANY_KEY} "=" {self._value(shape.extra)}')
        rules.append(
            f'{rule}_{last}: ({extra} (", " {extra})*)?' if extra else f'{rule}_{last}: ""'
        )
        rules.append(f'{rule}_m{last}: (", " {extra})*' if extra else f'{rule}_m{last}: ""')
        return rules

    def _key(self, name: str) -> str:
        if not _NAMED.fullmatch(name):
            raise self._refusal(
                f"this model's calls cannot name a property {name[:80]!r}: a name has at most"
                f" {MAX_KEY} letters, digits and signs of '_.-', and begins with a letter or '_'",
                "invalid_schema",
            )
        return self._literal(f"{name}=")

    def _value(self, schema: Any) -> str:
        variants = self._schema.variants(schema) or [{}]
        options = [option for one in variants for option in self._options(one)]
        return f"({' | '.join(dict.fromkeys(options))})"

    def _options(self, variant: Schema) -> Iterator[str]:
        """Yield the alternatives of a value."""
        if has_values(variant):
            for value in values_of(variant):
                yield self._literal(written(value))
            return
        types = self._schema.variant_types(variant)
        for kind in sorted(types or _WORDS):
            for word in _WORDS.get(kind, ()):
                yield self._literal(word)
        rest = sorted(types - _WORDS.keys())
        if rest or not types:
            schema = {**variant, "type": rest} if types else _ANY
            lark = schema_lark({**self._schema.definitions_for(variant), **schema}, _JSON)
            self._size += len(lark)
            if self._size > MAX_GRAMMAR_BYTES:
                raise self._refusal("its definitions are too long", "schema_too_large")
            yield lark

    def _refusal(self, why: str, code: str) -> ApiError:
        field = self._tool.source.field
        return invalid(f"{field}: {why}", field, code)


def written(value: Any) -> str:
    """Return an argument as the grammar lets a model write it."""
    if value is None or isinstance(value, bool):
        return _SPELLED[value]
    return json.dumps(value, ensure_ascii=False)
