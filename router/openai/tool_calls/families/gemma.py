"""Gemma 4: calls in a notation of their own, whose strings stand between quote tokens.

<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1,list:[true,{a:null}]}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from protocol.sampling_params import MAX_GRAMMAR_BYTES
from router.common.errors import ApiError, invalid
from router.openai.bodies.grammar_source import schema_lark
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.argument_schema import (
    ArgumentSchema,
    ObjectShape,
    Schema,
    has_values,
    values_of,
)
from router.openai.tool_calls.families.gemma_parser import (
    CALL,
    END_CALL,
    MAX_KEY,
    QUOTE,
    GemmaCallParser,
)
from router.openai.tool_calls.tool_parser import ToolParser
from router.openai.tool_calls.tool_syntax import CallableTool, ToolSchemas

_BARE_KEY = re.compile(rf"[^:,{{}}\[\]<\s][^:,{{}}\[\]<\n]{{0,{MAX_KEY - 1}}}")
_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_.$-]{0,63}/"
_JSON = {"whitespace_flexible": False, "lenient": True, "coerce_one_of": True}


class GemmaCalls:
    """The syntax of Gemma 4."""

    name = "gemma4"
    trigger = CALL
    begin = CALL
    between = END_CALL + CALL
    end = END_CALL
    before = ""
    call_start = ""
    marks = f"{CALL}\n{END_CALL}\n{QUOTE}"

    def is_written_by(self, template: str) -> bool:
        return CALL in template and QUOTE in template

    def call_rules(
        self, rule: str, tool: CallableTool, vocabulary: AddedTokenVocabulary
    ) -> list[str]:
        return _CallRules(rule, tool, vocabulary).rules()

    def shared_rules(self, vocabulary: AddedTokenVocabulary) -> list[str]:
        quote = vocabulary.literal(QUOTE)
        is_token = QUOTE in vocabulary.control
        string = f"{quote} STRING_TEXT {quote}" if is_token else f"{quote} string_end"
        number = schema_lark({"type": "number"}, _JSON)
        return [
            f"string: {string}",
            r"STRING_TEXT: /(.|\n)*/"
            + ("" if is_token else rf" & ~/(.|\n)*{_QUOTE_REGEX}(.|\n)*/"),
            *([] if is_token else [f"string_end[lazy]: STRING_TEXT {json.dumps(QUOTE)}"]),
            f'any: string | {number} | "true" | "false" | "null" | any_array | any_object',
            'any_array: "[" (any ("," any)*)? "]"',
            'any_object: "{" (any_pair ("," any_pair)*)? "}"',
            f'any_pair: {_ANY_KEY} ":" any',
        ]

    def new_parser(self, schemas: ToolSchemas, *, forced: bool = False) -> ToolParser:
        return GemmaCallParser(schemas, forced=forced)


_QUOTE_REGEX = re.escape(QUOTE).replace("/", r"\/")

GEMMA4 = GemmaCalls()


class _CallRules:
    """Makes the rules of one call. Each schema becomes a rule, so that references to definitions,
    which may be recursive, are references to rules."""

    def __init__(self, rule: str, tool: CallableTool, vocabulary: AddedTokenVocabulary) -> None:
        self._rule = rule
        self._tool = tool
        self._literal = vocabulary.literal
        self._quote_is_token = QUOTE in vocabulary.control
        self._schema = ArgumentSchema(tool.schema)
        self._names: dict[int, str] = {}  # id of a schema -> its rule
        self._pending: list[tuple[str, Any]] = []
        self._rules: list[str] = []
        self._size = 0

    def rules(self) -> list[str]:
        arguments = f"{self._rule}_arguments"
        head = self._literal(f"call:{self._tool.name}")
        self._object(arguments, self._schema.shape(self._tool.schema))
        while self._pending:
            name, schema = self._pending.pop()
            self._add(f"{name}: {' | '.join(dict.fromkeys(self._options(name, schema)))}")
        return [f"{self._rule}: {head} {arguments}", *self._rules]

    def _value(self, schema: Any) -> str:
        """Return the name of the rule for a value."""
        variants = self._schema.variants(schema)
        if not any(map(self._schema.variant_types, variants)):
            return "any"
        one = variants[0] if len(variants) == 1 else schema
        if id(one) not in self._names:
            self._names[id(one)] = f"{self._rule}_{len(self._names)}"
            self._pending.append((self._names[id(one)], one))
        return self._names[id(one)]

    def _options(self, name: str, schema: Any) -> list[str]:
        options: list[str] = []
        for place, one in enumerate(self._schema.variants(schema)):
            if has_values(one):
                options += [self._constant(value) for value in values_of(one)]
                continue
            for kind in sorted(self._schema.variant_types(one)) or ["any"]:
                options += self._typed(f"{name}_{place}_{kind}", one, kind)
        return options

    def _typed(self, name: str, schema: Schema, kind: str) -> Sequence[str]:
        if kind == "any":
            return ["any"]
        if kind == "string":
            return [self._string(name, schema)]
        if kind == "boolean":
            return ['"true"', '"false"']
        if kind == "null":
            return ['"null"']
        if kind in ("integer", "number"):
            limits = {key: value for key, value in schema.items() if key in _NUMBER_LIMITS}
            return [schema_lark({"type": kind, **limits}, _JSON)]
        if kind == "array":
            self._array(name, schema)
        else:
            self._object(name, self._schema.shape(schema))
        return [name]

    def _constant(self, value: Any) -> str:
        return self._literal(written(value))

    def _string(self, name: str, schema: Schema) -> str:
        least, most = schema.get("minLength"), schema.get("maxLength")
        least = least if isinstance(least, int) and least > 0 else 0
        most = most if isinstance(most, int) and most >= least else None
        if not least and most is None:
            return "string"
        quote, text = self._literal(QUOTE), f"{name}_text".upper()
        bounds = f"{least},{'' if most is None else most}"
        self._add(rf"{text}: STRING_TEXT & /(.|\n){{{bounds}}}/")
        if self._quote_is_token:
            self._add(f"{name}: {quote} {text} {quote}")
        else:
            self._add(f"{name}: {quote} {name}_end")
            self._add(f"{name}_end[lazy]: {text} {quote}")
        return name

    def _array(self, name: str, schema: Schema) -> None:
        item = self._value(self._schema.item_schema(schema))
        least, most = schema.get("minItems"), schema.get("maxItems")
        least = least if isinstance(least, int) and least > 0 else 0
        if isinstance(most, int) and most <= max(least, 0):
            items = f'{item} ("," {item}){{{most - 1}}}' if most > 0 else '""'
        else:
            further = f"{max(least - 1, 0)},{most - 1 if isinstance(most, int) else ''}"
            items = f'{item} ("," {item}){{{further}}}'
            items = items if least else f"({items})?"
        self._add(f'{name}: "[" {items} "]"')

    def _object(self, name: str, shape: ObjectShape) -> None:
        """Add the rules of an object: ``name``_N is what may come from property N on while there
        is none yet, and ``name``_mN after another one."""
        pairs = [(self._pair(one.name, one.schema), one.required) for one in shape.properties]
        extra = "" if shape.extra is None else f'{_ANY_KEY} ":" {self._value(shape.extra)}'
        last = len(pairs)
        self._add(f'{name}: "{{" {name}_0 "}}"')
        for place, (pair, required) in enumerate(pairs):
            rest, more = f"{name}_m{place + 1}", f"{name}_{place + 1}"
            self._add(f"{name}_{place}: {pair} {rest}" + ("" if required else f" | {more}"))
            following = f'"," {pair}' if required else f'("," {pair})?'
            self._add(f"{name}_m{place}: {following} {rest}")
        self._add(f'{name}_{last}: ({extra} ("," {extra})*)?' if extra else f'{name}_{last}: ""')
        self._add(f'{name}_m{last}: ("," {extra})*' if extra else f'{name}_m{last}: ""')

    def _pair(self, key: str, schema: Any) -> str:
        if not _BARE_KEY.fullmatch(key) or key != key.strip():
            raise self._refusal(
                f"this model's calls cannot name a property {key[:80]!r}: a name has at most"
                f" {MAX_KEY} characters and none of ':,{{}}[]<'",
                "invalid_schema",
            )
        return f"{self._literal(key + ':')} {self._value(schema)}"

    def _add(self, rule: str) -> None:
        self._size += len(rule)
        if self._size > MAX_GRAMMAR_BYTES:
            raise self._refusal("its grammar is too long", "schema_too_large")
        self._rules.append(rule)

    def _refusal(self, why: str, code: str) -> ApiError:
        field = self._tool.source.field
        return invalid(f"{field}: {why}", field, code)


_NUMBER_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


def written(value: Any) -> str:
    """Return JSON ``value`` in Gemma's notation."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)
