"""The effective configuration as YAML, which can be used as a file again; secrets are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import yaml
from pydantic import SecretStr
from rich.text import Text

from cluster.config.keys import KEYS, Key
from cluster.config.schema import Config
from cluster.config.settle import Value, masks
from cluster.config.value_checks import MASK

_INDENT = 2


class Line(NamedTuple):
    """``indent: name: value  # comment``; a section has neither value nor comment."""

    indent: int
    name: str
    value: str = ""
    comment: str = ""


def lines(values: Mapping[Key, Value]) -> Iterator[Line]:
    """In the order of the schema, a line for each section and key."""
    open_: tuple[str, ...] = ()
    for key in KEYS:
        parents = key.path[:-1]
        for depth, (now, then) in enumerate(zip_longest(parents, open_)):
            if now is not None and (now != then or open_[: depth + 1] != parents[: depth + 1]):
                yield Line(_INDENT * depth, now)
        open_ = parents
        value, origin = values[key]
        yield Line(_INDENT * len(parents), key.path[-1], _scalar(key, value), str(origin))


def render(values: Mapping[Key, Value], *, color: bool) -> Text:
    """All of it, with the comments in a column."""
    every = list(lines(values))
    width = max(len(_plain(line)) for line in every if len(_plain(line)) <= 40) + 2
    text = Text(no_wrap=True)
    for line in every:
        comment = f"# {line.comment}" if line.comment else ""
        text.append(" " * line.indent)
        text.append(f"{line.name}:", "cyan" if color else "")
        text.append(f" {line.value}" if line.value else "")
        if comment:
            text.append(" " * max(2, width - len(_plain(line))))
            default = line.comment == "default"
            text.append(comment, ("dim" if default else "green") if color else "")
        text.append("\n")
    return text


def _plain(line: Line) -> str:
    return f"{' ' * line.indent}{line.name}:{' ' + line.value if line.value else ''}"


def _scalar(key: Key, value: Any) -> str:
    if masks(key, value):
        return MASK
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str):
        plain: str = yaml.safe_dump(value, width=1 << 20, allow_unicode=True)
        return plain.partition("\n")[0] if "\n" not in value else json.dumps(value)
    return json.dumps(value)


def schema() -> str:
    """JSON schema of the file, for editors."""
    described = Config.model_json_schema()
    described["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    described["title"] = "Baton cluster"
    return json.dumps(described, indent=2)
