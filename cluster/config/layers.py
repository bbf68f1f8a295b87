"""What each place gives for each key, checked by itself: a mistake counts even where another place
wins over it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from cluster.config import yaml_file
from cluster.config.keys import KEYS, Key
from cluster.config.mistakes import Mistake, Origin, by_flag, in_environment
from cluster.config.yaml_file import Given

_LONGEST_SHOWN = 80


class Flags(NamedTuple):
    """What the command line gives: the file, and texts by key with the flag that brought them."""

    file: Path | None = None
    texts: Mapping[Key, tuple[str, str]] = {}


class Value(NamedTuple):
    """A checked value of one key."""

    value: Any
    origin: Origin


class Layer(NamedTuple):
    values: dict[Key, Value]
    mistakes: list[Mistake]


def of_file(path: Path) -> Layer:
    contents = yaml_file.read(path, str(path))
    layer = Layer({}, list(contents.mistakes))
    for key in KEYS:
        if key.path in contents.values:
            _take(layer, key, contents.values[key.path], folder=path.parent)
    _check_readers(layer, path)
    return layer


def of_environment(environ: Mapping[str, str]) -> Layer:
    layer = Layer({}, [])
    for key in KEYS:
        text = environ.get(key.variable, "")
        if text:  # an empty variable is one that is not set
            _take(layer, key, _text(key, text, in_environment(key.variable)))
    return layer


def of_flags(flags: Flags) -> Layer:
    layer = Layer({}, [])
    for key, (flag, text) in flags.texts.items():
        _take(layer, key, _text(key, text, by_flag(flag)))
    return layer


def _text(key: Key, text: str, origin: Origin) -> Given:
    """Of a text from outside YAML, whose type the key decides."""
    shown = "a hidden value" if key.secret else repr(text)
    if text == "null" and key.optional:
        return Given(None, shown, origin)
    try:
        value = text if key.is_text else key.adapter.validate_strings(text)
    except ValidationError:
        value = text  # fails once more below, where it is told
    return Given(value, shown, origin)


def _take(layer: Layer, key: Key, given: Given, folder: Path = Path()) -> None:
    try:
        value = key.adapter.validate_python(given.value, strict=True)
    except ValidationError as e:
        layer.mistakes.append(Mistake(given.origin, key.name, _reason(key, given, e)))
        return
    layer.values[key] = Value(_beside(key, value, folder), given.origin)


def _reason(key: Key, given: Given, error: ValidationError) -> str:
    """What came and what was expected."""
    causes = [str(e["ctx"]["error"]) for e in error.errors() if e["type"] == "value_error"]
    expected = causes[0] if causes else key.expected
    if isinstance(given.value, int | float) and key.is_text and not causes:
        expected += " (put it in quotes)"
    hint = ""
    if isinstance(given.value, str) and key.choices:
        close = difflib.get_close_matches(given.value, key.choices, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
    if given.shown.startswith("'tcp://"):
        hint = "; Kubernetes sets it for a service of this name, unless enableServiceLinks is false"
    shown = (
        given.shown if len(given.shown) <= _LONGEST_SHOWN else given.shown[:_LONGEST_SHOWN] + "..."
    )
    return f"got {shown}; expected {expected}{hint}"


def _beside(key: Key, value: Any, folder: Path) -> Any:
    """A file name, absolute: in a configuration file it counts from its folder, elsewhere from
    here. So does a model that lies there; another name of one may be of the hub."""
    whole = key.is_file or key.name == "autoscaler.log"
    if not isinstance(value, str) or not (whole or key.name == "model.path"):
        return value
    try:
        path = folder.absolute() / Path(value).expanduser()
        return str(path) if whole or path.is_dir() else value
    except (OSError, RuntimeError):  # too long for a name; a user who is not there
        return value


def _check_readers(layer: Layer, path: Path) -> None:
    """A file with secrets is nobody else's to read."""
    secrets = [(k, v) for k, v in layer.values.items() if masks(k, v.value)]
    if secrets and path.stat().st_mode & 0o007:
        mode = f"{path.stat().st_mode & 0o777:04o}"
        text = f"a secret in a file that every user may read (mode {mode}): chmod 600 it"
        layer.mistakes.extend(Mistake(v.origin, k.name, text) for k, v in secrets)


def masks(key: Key, value: Any) -> bool:
    """Whether a value is to be hidden. A URL without a password and options is not."""
    from cluster.settings import without_password

    if not key.secret or value is None:
        return False
    text = value.get_secret_value()
    return not key.name.endswith("url") or without_password(text) != text


def winners(layers: Iterable[Layer]) -> dict[Key, Value]:
    """By key, the value of the last layer that has one."""
    return {key: value for layer in layers for key, value in layer.values.items()}
