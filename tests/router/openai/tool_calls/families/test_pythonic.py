"""Calls written as a list of Python calls, and the JSON of their arguments."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from router.openai.tool_calls.families.pythonic import PYTHONIC
from router.openai.tool_calls.families.syntaxes import detect_syntax
from tests.router.openai.tool_calls.writing import Calls, run


def parsed(text: str, *, forced: bool = False) -> tuple[str, Calls]:
    """Return content and calls, which are the same however the text is cut."""
    whole = run(PYTHONIC.new_parser({}, forced=forced), [text])
    assert run(PYTHONIC.new_parser({}, forced=forced), list(text)) == whole
    for seed in range(3):
        draw = random.Random(seed)
        cuts = [0, *sorted(draw.sample(range(len(text) + 1), min(len(text), 3))), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        assert run(PYTHONIC.new_parser({}, forced=forced), pieces) == whole
    return whole


def arguments(text: str) -> Any:
    content, calls = parsed(f"[f({text})]")
    assert content == "" and [name for name, _ in calls] == ["f"]
    return json.loads(calls[0][1])


def test_two_calls_of_one_answer() -> None:
    content, calls = parsed('[get_weather(city="Bonn", days=3), stop()]')
    assert content == ""
    assert calls == [("get_weather", '{"city": "Bonn", "days": 3}'), ("stop", "{}")]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("True", True),
        ("false", False),
        ("None", None),
        ("-1.5e3", -1500.0),
        ("'it\\'s'", "it's"),
        ('"a\\tb\\x41\\u00e4\\U0001f98a\\q"', "a\tbAä🦊\\q"),
        ('"\\ud83e\\udd8a"', "🦊"),
        ('"a, b) ]"', "a, b) ]"),
        ("[1, ['x'], (True, None)]", [1, ["x"], [True, None]]),
        ("{'a': {'b': [], 3: \"c\"}}", {"a": {"b": [], "3": "c"}}),
        ("{}", {}),
        ("kelvin", "kelvin"),
    ],
)
def test_python_values_become_json(written: str, value: Any) -> None:
    assert arguments(f"x={written}, y = 1") == {"x": value, "y": 1}


def test_what_does_not_belong_is_skipped() -> None:
    assert arguments("12, a=1,, b={'c', 'd': }, e=[)]") == {"a": 1, "b": {"c": None, "d": None}} | {
        "e": []
    }


@pytest.mark.parametrize("text", ["[1, 2]", "[link](http://a)", "f(a=1)", "Hello [f(a=1)]", "[f"])
def test_other_text_is_content(text: str) -> None:
    assert parsed(text) == (text, [])


def test_a_call_that_is_cut_leaves_no_markup() -> None:
    assert parsed("[get_wea", forced=True) == ("", [])
    assert parsed('[f(a="Bo') == ("", [("f", '{"a": "Bo')])
    assert parsed("[f(a=1), g") == ("", [("f", '{"a": 1}')])


def test_nesting_is_bounded() -> None:
    _, calls = parsed("[f(a=" + "[" * 500 + "]" * 500 + ")]")
    assert calls[0][1].count("[") < 70


@pytest.mark.parametrize(
    "template",
    [
        "Answer as [func_name1(params_name1=value1, params_name2=value2), func_name2()]",
        "{{ '[' }}{% for call in calls %}{{ call.name + '(' }}{% endfor %}",
        "[{% for c in calls %}{{ call['name'] ~ '(' }}{% endfor %}]",
    ],
)
def test_templates_of_this_syntax(template: str) -> None:
    assert detect_syntax(template) is PYTHONIC
