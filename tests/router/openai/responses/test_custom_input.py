from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.responses.custom_input import CustomInputScanner


def scanned(text: str, cuts: list[int]) -> str:
    scanner = CustomInputScanner()
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [scanner.push(text[a:b]) for a, b in itertools.pairwise(places)]
    return "".join(parts) + scanner.flush()


@given(st.text(alphabet=st.characters(codec="utf-8")), st.booleans(), st.lists(st.integers(0, 200)))
def test_any_text_comes_out_wherever_it_is_cut(
    text: str, ascii_only: bool, cuts: list[int]
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert scanned(arguments, cuts) == text
    compact = json.dumps({"input": text}, ensure_ascii=ascii_only, separators=(",", ":"))
    assert scanned(compact, [*range(len(compact))]) == text


@given(st.text(max_size=300), st.lists(st.integers(0, 300)))
def test_anything_gives_the_same_wherever_it_is_cut(text: str, cuts: list[int]) -> None:
    assert scanned(text, cuts) == scanned(text, [])


def test_text_comes_before_the_end() -> None:
    scanner = CustomInputScanner()
    pieces = [scanner.push(part) for part in ('{"inp', 'ut": "a', "b\\", 'n"', "}")]
    assert pieces == ["", "a", "b", "\n", ""]


@pytest.mark.parametrize("text", ["*** Begin Patch", '{"patch": "x"}', "", "[1]"])
def test_other_arguments_are_the_input_themselves(text: str) -> None:
    assert scanned(text, []) == text
    assert scanned(text, [*range(len(text))]) == text


def test_a_string_that_is_cut_ends_where_it_was_cut() -> None:
    assert scanned('{"input":"ab\\u00', []).startswith("ab")


@pytest.mark.parametrize("text", ['{"inpu', '{ "input" : ', "{"])
def test_a_wrapper_that_is_cut_is_no_input(text: str) -> None:
    assert scanned(text, []) == ""
