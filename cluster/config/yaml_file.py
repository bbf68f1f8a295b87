"""A configuration file: the value of each key with its line. Values are not judged here.

The text is composed to YAML's nodes, which know their lines, and walked along the schema. What
stands where no key is, is a mistake; so is a key that comes twice.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cluster.config import keys
from cluster.config.mistakes import DEFAULT, Mistake, Origin, in_file

_MOST_BYTES = 1 << 20
_QUOTED = re.compile(r"'[^']{2,}'")  # what YAML's own messages quote may be a secret
_ABSENT = "tag:yaml.org,2002:null"


class Given(NamedTuple):
    """A value as it was given. ``shown``: as it was written."""

    value: Any
    shown: str
    origin: Origin


class Contents(NamedTuple):
    values: dict[keys.Path, Given]
    mistakes: list[Mistake]


class _NoValue:
    """Of a mapping or a list where one value should be: no type takes it."""


def read(path: Path, name: str) -> Contents:
    """``name``: the file in messages."""
    origin = DEFAULT._replace(rank=1, text=name)
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            return Contents({}, [Mistake(origin, "", f"larger than {_MOST_BYTES} bytes")])
        return parse(raw.decode(), name)
    except OSError as e:
        return Contents({}, [Mistake(origin, "", f"cannot be read: {e.strerror}")])
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        return Contents({}, [Mistake(in_file(name, line), "", "not UTF-8")])


def parse(text: str, name: str) -> Contents:
    """The values and mistakes of a file's text."""
    walk = _Walk(name)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            walk.section(root, ())
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        problem = _QUOTED.sub("...", e.problem or e.context or "no YAML")
        line = mark.line + 1 if mark else 1
        walk.mistakes.append(Mistake(in_file(name, line), "", f"not YAML: {problem}"))
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        text = "not YAML: a control character"
        walk.mistakes.append(Mistake(in_file(name, line), "", text))
    except RecursionError:
        walk.mistakes.append(Mistake(in_file(name, 1), "", "nested too deeply"))
    return Contents(walk.values, walk.mistakes)


class _Walk:
    """Down the nodes, along the schema, which bounds the depth."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scalars = yaml.SafeLoader("")
        self.values: dict[keys.Path, Given] = {}
        self.mistakes: list[Mistake] = []

    def section(self, node: yaml.Node, path: keys.Path) -> None:
        if isinstance(node, yaml.ScalarNode) and node.tag == _ABSENT:
            return  # a section with nothing in it
        if not isinstance(node, yaml.MappingNode):
            known = ", ".join(_children(path))
            text = f"got {_kind(node)}; expected a mapping of {known}"
            self._mistake(node, path, text)
            return
        for name, value_node in self._entries(node, path):
            here = (*path, name)
            if here in keys.SECTIONS:
                self.section(value_node, here)
            else:
                self.values[here] = self._value(value_node, keys.BY_PATH[here])

    def _entries(self, node: yaml.MappingNode, path: keys.Path) -> Iterator[tuple[str, yaml.Node]]:
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            known = (*path, name) in keys.BY_PATH or (*path, name) in keys.SECTIONS
            if name in lines:
                text = f"comes twice; first in line {lines[name]}"
                self._mistake(key_node, (*path, name), text)
            elif known:
                lines[name] = key_node.start_mark.line + 1
                yield name, value_node
            else:
                lines[name] = key_node.start_mark.line + 1
                self._mistake(key_node, (*path, name or "?"), f"unknown key{_near(path, name)}")

    def _value(self, node: yaml.Node, key: keys.Key) -> Given:
        origin = in_file(self._name, node.start_mark.line + 1)
        if not isinstance(node, yaml.ScalarNode):
            return Given(_NoValue(), _kind(node), origin)
        shown = repr(node.value) if node.style else node.value or "nothing"
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            return Given(_NoValue(), "a value with a tag", origin)
        if isinstance(value, bool) and node.value in key.choices:
            value = node.value  # the word off, which to YAML is false
        return Given(value, "a hidden value" if key.secret else shown, origin)

    def _mistake(self, node: yaml.Node, path: keys.Path, text: str) -> None:
        origin = in_file(self._name, node.start_mark.line + 1)
        self.mistakes.append(Mistake(origin, ".".join(path), text))


def _children(path: keys.Path) -> list[str]:
    return list(dict.fromkeys(k.path[len(path)] for k in keys.KEYS if k.path[: len(path)] == path))


def _near(path: keys.Path, name: str) -> str:
    """What was meant: a key beside it, or one of nearly the same name anywhere."""
    if name == "<<":
        return "; merging is not supported: write the keys out"
    written = name.replace("-", "_")
    beside = _children(path)
    alike = {".".join((*path, known)): _likeness(known, written) + 0.1 for known in beside}
    elsewhere = {alias: k.name for k in keys.KEYS for alias in (k.path[-1], _flag_name(k), k.name)}
    for alias, key in elsewhere.items():
        alike[key] = max(alike.get(key, 0.0), _likeness(alias, written))
    best = max(alike, key=lambda key: alike[key])
    if alike[best] >= 0.65:
        return f"; did you mean {best}?"
    return f"; expected one of {', '.join(beside)}"


def _likeness(known: str, given: str) -> float:
    """0 to 1."""
    return difflib.SequenceMatcher(None, known, given).ratio()


def _flag_name(key: keys.Key) -> str:
    return (key.flag or "").strip("-").replace("-", "_")


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
