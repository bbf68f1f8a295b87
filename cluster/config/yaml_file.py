"""A configuration file: the value of each key with its line. ``resolve`` checks the values.

PyYAML composes the text into nodes, which know their lines; the nodes are walked along the schema.
Text at a place without a key is a mistake, and so is a key that appears twice.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cluster.config import keys
from cluster.config.mistakes import DEFAULT_ORIGIN, ConfigMistake, ValueOrigin, file_origin
from cluster.config.schema import REMOVED_KEYS

_MAX_BYTES = 1 << 20
_QUOTED = re.compile(r"'([^']*)'")
_SYNTAX = re.compile(r".?|<[a-z ]+>|\\.")  # what PyYAML quotes of the language itself
_ABSENT = "tag:yaml.org,2002:null"
_REMOVED = {tuple(old.name.split(".")): old for old in REMOVED_KEYS}


class WrittenValue(NamedTuple):
    """A value of one key in a file, variable or flag; ``shown`` is its text for messages."""

    value: Any
    shown: str
    origin: ValueOrigin


class FileContents(NamedTuple):
    """The values of a file by the paths of their keys, and its mistakes."""

    values: dict[keys.KeyPath, WrittenValue]
    mistakes: list[ConfigMistake]


class _NoValue:
    """Stands for a mapping or list where a single value is expected: no type accepts it."""


def read_config_file(path: Path, name: str) -> FileContents:
    """Read and parse a configuration file; messages call it ``name``."""
    origin = DEFAULT_ORIGIN._replace(rank=1, text=name)
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            return FileContents({}, [ConfigMistake(origin, "", f"larger than {_MAX_BYTES} bytes")])
        return parse_config_file(raw.decode(), name)
    except OSError as e:
        return FileContents({}, [ConfigMistake(origin, "", f"cannot be read: {e.strerror}")])
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        return FileContents({}, [ConfigMistake(file_origin(name, line), "", "not UTF-8")])


def parse_config_file(text: str, name: str) -> FileContents:
    """Return the values and mistakes of the text of a file."""
    walk = _NodeWalk(name)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            walk.section(root, ())
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        if mark and mark.index >= len(text) and e.context_mark:  # what begins there never ends
            mark = e.context_mark
        problem = _without_values(e.problem or e.context or "no YAML")
        line = mark.line + 1 if mark else 1
        walk.mistakes.append(ConfigMistake(file_origin(name, line), "", f"not YAML: {problem}"))
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        text = "not YAML: a control character"
        walk.mistakes.append(ConfigMistake(file_origin(name, line), "", text))
    except RecursionError:
        walk.mistakes.append(ConfigMistake(file_origin(name, 1), "", "nested too deeply"))
    return FileContents(walk.values, walk.mistakes)


def _without_values(problem: str) -> str:
    """Return a message of PyYAML without text that it quotes from the file: it may be a secret."""
    if problem.count("'") % 2:
        return problem.partition("'")[0] + "..."
    return _QUOTED.sub(lambda found: found[0] if _SYNTAX.fullmatch(found[1]) else "...", problem)


class _NodeWalk:
    """One walk down the nodes of a file. The schema bounds the depth."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scalars = yaml.SafeLoader("")
        self.values: dict[keys.KeyPath, WrittenValue] = {}
        self.mistakes: list[ConfigMistake] = []

    def section(self, node: yaml.Node, path: keys.KeyPath) -> None:
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
                self.values[here] = self._value(value_node, keys.KEYS_BY_PATH[here])

    def _entries(
        self, node: yaml.MappingNode, path: keys.KeyPath
    ) -> Iterator[tuple[str, yaml.Node]]:
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            known = (*path, name) in keys.KEYS_BY_PATH or (*path, name) in keys.SECTIONS
            if name in lines:
                text = f"is given twice; first in line {lines[name]}"
                self._mistake(key_node, (*path, name), text)
            elif known:
                lines[name] = key_node.start_mark.line + 1
                yield name, value_node
            else:
                lines[name] = key_node.start_mark.line + 1
                old = _REMOVED.get((*path, name))
                where = (*path, name or "?") if old is None else ()
                text = f"unknown key{_suggestion(path, name)}" if old is None else old.text
                self._mistake(key_node, where, text)

    def _value(self, node: yaml.Node, key: keys.ConfigKey) -> WrittenValue:
        origin = file_origin(self._name, node.start_mark.line + 1)
        if not isinstance(node, yaml.ScalarNode):
            return WrittenValue(_NoValue(), _kind(node), origin)
        shown = repr(node.value) if node.style else node.value or "nothing"
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            return WrittenValue(_NoValue(), "a value with a tag", origin)
        if isinstance(value, bool) and node.value in key.choices:
            value = node.value  # YAML reads the word off as false
        return WrittenValue(value, "a hidden value" if key.secret else shown, origin)

    def _mistake(self, node: yaml.Node, path: keys.KeyPath, text: str) -> None:
        origin = file_origin(self._name, node.start_mark.line + 1)
        self.mistakes.append(ConfigMistake(origin, ".".join(path), text))


def _children(path: keys.KeyPath) -> list[str]:
    return list(
        dict.fromkeys(k.path[len(path)] for k in keys.CONFIG_KEYS if k.path[: len(path)] == path)
    )


def _suggestion(path: keys.KeyPath, name: str) -> str:
    """Suggest the key that was meant: one of the same section, or a similar name elsewhere."""
    if name == "<<":
        return "; merging is not supported: write the keys out"
    written = name.replace("-", "_")
    beside = _children(path)
    alike = {".".join((*path, known)): _similarity(known, written) + 0.1 for known in beside}
    elsewhere = {
        alias: k.name for k in keys.CONFIG_KEYS for alias in (k.path[-1], _flag_name(k), k.name)
    }
    for alias, key in elsewhere.items():
        alike[key] = max(alike.get(key, 0.0), _similarity(alias, written))
    best = max(alike, key=lambda key: alike[key])
    if alike[best] >= 0.65:
        return f"; did you mean {best}?"
    return f"; expected one of {', '.join(beside)}"


def _similarity(known: str, given: str) -> float:
    return difflib.SequenceMatcher(None, known, given).ratio()


def _flag_name(key: keys.ConfigKey) -> str:
    return (key.flag or "").strip("-").replace("-", "_")


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
