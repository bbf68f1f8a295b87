"""The effective configuration as YAML, for `baton config`.

The output is a valid configuration file, except that secrets are masked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import yaml
from pydantic import SecretStr
from rich.text import Text

from cluster.config.keys import CONFIG_KEYS, ConfigKey
from cluster.config.resolve import ConfigValue, must_hide
from cluster.config.schema import Config
from cluster.config.value_checks import MASK

_INDENT = 2


class ConfigLine(NamedTuple):
    """One line ``name: value  # comment``; a section has neither value nor comment."""

    indent: int
    name: str
    value: str = ""
    comment: str = ""


def config_lines(values: Mapping[ConfigKey, ConfigValue]) -> Iterator[ConfigLine]:
    """Yield a line for each section and key, in the order of the schema."""
    open_: tuple[str, ...] = ()
    for key in CONFIG_KEYS:
        parents = key.path[:-1]
        for depth, (now, then) in enumerate(zip_longest(parents, open_)):
            if now is not None and (now != then or open_[: depth + 1] != parents[: depth + 1]):
                yield ConfigLine(_INDENT * depth, now)
        open_ = parents
        value, origin = values[key]
        yield ConfigLine(_INDENT * len(parents), key.path[-1], _scalar(key, value), str(origin))


def render_config(values: Mapping[ConfigKey, ConfigValue], *, color: bool) -> Text:
    """Return all lines, with the comments aligned in a column."""
    every = list(config_lines(values))
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


def _plain(line: ConfigLine) -> str:
    return f"{' ' * line.indent}{line.name}:{' ' + line.value if line.value else ''}"


def _scalar(key: ConfigKey, value: Any) -> str:
    if must_hide(key, value):
        return MASK
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str):
        plain: str = yaml.safe_dump(value, width=1 << 20, allow_unicode=True)
        return plain.partition("\n")[0] if "\n" not in value else json.dumps(value)
    return json.dumps(value)


def json_schema() -> str:
    """Return the JSON schema of a configuration file, for editors."""
    described = Config.model_json_schema()
    described["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    described["title"] = "Baton cluster"
    return json.dumps(described, indent=2)
