"""The table of a scenario's keys says what the scenario's own sections say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.simulator.scenario import Scenario, parse_scenario

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
NEEDED = "needed"


def sections(kind: Any) -> list[type[BaseModel]]:
    """Those that a field's type is made of."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [found for part in get_args(kind) for found in sections(part)]


def choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [value for part in get_args(kind) for value in choices(part)]


def defined(model: type[BaseModel] = Scenario, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All keys, with dots; what both pools have counts as POOL's."""
    for name, field in model.model_fields.items():
        inner = sections(field.annotation)
        lists = get_origin(field.annotation) is tuple
        if not inner or lists or type(None) in get_args(field.annotation):
            yield path + name, field
        for section in inner:
            whose = "POOL" if path == "machines." else name
            yield from defined(section, f"{path}{whose}{'[]' * lists}.")


KEYS = dict(defined())


def rows() -> Iterator[tuple[list[str], list[str], str]]:
    """Keys, their defaults as they are told, and what they are, of each row."""
    [table] = re.findall(r"^### Keys of a scenario$(.*?)^## ", PAGE.read_text(), re.M | re.S)
    for line in re.findall(r"^\| `.*\|$", table, re.M):
        names, values, text = (cell.strip() for cell in line.strip("|").split(" | "))
        first, *others = re.findall(r"`([^`]+)`", names)
        section = first.rpartition(".")[0]
        keys = [first, *(f"{section}.{name}".lstrip(".") for name in others)]
        told = [value.strip("`") for value in values.split(", ")]
        yield keys, told, text


TOLD = {
    key: (value, text)
    for keys, values, text in rows()
    for key, value in zip(keys, values, strict=True)
}


def test_every_key_is_told_once() -> None:
    assert sorted(key for keys, _, _ in rows() for key in keys) == sorted(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_defaults_are_those_that_are_told(key: str) -> None:
    field, (told, _) = KEYS[key], TOLD[key]
    if field.is_required():
        assert told == NEEDED
        return
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    # What is a word is told as one: to YAML the word off is false.
    value = told if isinstance(default, str) else yaml.safe_load(told)
    assert value == default and isinstance(value, bool) == isinstance(default, bool)


@pytest.mark.parametrize("key", [k for k, field in KEYS.items() if choices(field.annotation)])
def test_choices_are_told(key: str) -> None:
    default, text = TOLD[key]
    if key != "events[].pool":  # POOL, said above the table
        words = set(re.findall(r"[\w-]+", f"{default} {text}"))
        assert words >= set(choices(KEYS[key].annotation))


def test_the_example_is_a_scenario() -> None:
    page = PAGE.read_text()
    [text] = re.findall(r"^```yaml\n(seconds:.*?)^```", page, re.M | re.S)
    assert parse_scenario(yaml.safe_load(text)).events[0].kind == "die"
