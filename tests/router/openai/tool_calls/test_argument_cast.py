"""Texts become JSON of the types that their schema allows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.tool_calls.argument_cast import cast_text, json_string_piece
from router.openai.tool_calls.argument_schema import TYPES


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("3", "integer", "3"),
        ("-0.5", "integer", "-0.5"),
        (" 12\n", "number", "12"),
        ("1e999", "number", "1e999"),
        ("9" * 5000, "integer", "9" * 5000),
        ("03", "integer", '"03"'),
        ("NaN", "number", '"NaN"'),
        ("True", "boolean", "true"),
        ("0", "boolean", "false"),
        ("yes", "boolean", '"yes"'),
        ("None", "null string", "null"),
        ("nullable", "null string", '"nullable"'),
        ("3", "string", '"3"'),
        ("3", "string integer", "3"),
        ('{"a": [1]}', "object", '{"a": [1]}'),
        ("{'a': 1}", "object", "\"{'a': 1}\""),
        ("[1, NaN]", "array", '"[1, NaN]"'),
        ("[" * 100_000, "array", json.dumps("[" * 100_000)),
        ("[1]", "object", "[1]"),
        ("[1]", "object string", '"[1]"'),
        ('é"\n', "string", '"é\\"\\n"'),
    ],
)
def test_texts_become_json(text: str, types: str, written: str) -> None:
    assert cast_text(text, types.split()) == written


@given(st.text(), st.sets(st.sampled_from(sorted(TYPES))))
def test_the_result_is_always_json(text: str, types: set[str]) -> None:
    value = json.loads(cast_text(text, types))
    assert value is None or isinstance(value, bool | int | float | str | list | dict)


@given(st.lists(st.text()))
def test_pieces_join_to_one_string(pieces: list[str]) -> None:
    whole = '"' + "".join(map(json_string_piece, pieces)) + '"'
    assert json.loads(whole) == "".join(pieces)
