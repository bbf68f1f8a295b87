"""The configuration that counts, and where each of its values is from."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from cluster.config import consistency, yaml_file
from cluster.config.keys import BY_PATH, KEYS, Key
from cluster.config.mistakes import DEFAULT, ConfigError, Mistake, Origin, by_flag, in_environment
from cluster.config.schema import Config
from cluster.config.yaml_file import Given

# MERGED cluster.config.layers
# What each place gives for each key, checked by itself: a mistake counts even where another place
# wins over it.

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
    from cluster.settings.worker_settings import without_password

    if not key.secret or value is None:
        return False
    text = value.get_secret_value()
    return not key.name.endswith("url") or without_password(text) != text


def winners(layers: Iterable[Layer]) -> dict[Key, Value]:
    """By key, the value of the last layer that has one."""
    return {key: value for layer in layers for key, value in layer.values.items()}


class Settled(NamedTuple):
    """``values`` has every key."""

    config: Config
    values: dict[Key, Value]


def settle(
    flags: Flags,
    environ: Mapping[str, str],
    concerns: Collection[Key] = KEYS,
    needs: Collection[str] = (),
) -> Settled:
    """The configuration out of all places. ``concerns``: the keys that matter to who asks; what
    others mean together, and the files they name, are not looked at. ``needs``: names of keys that
    must not be null.

    Raises ConfigError with all mistakes."""
    given = [of_environment(environ), of_flags(flags)]
    if flags.file is not None:
        given.insert(0, of_file(flags.file))
    mistakes = [mistake for layer in given for mistake in layer.mistakes]
    defaults = {key: Value(key.field.default, DEFAULT) for key in KEYS}
    values = _without_outranked({**defaults, **winners(given)})
    config = Config.model_validate(_tree(values))
    wrong = {mistake.key for mistake in mistakes}
    mistakes += [m for m in _missing_files(values) if BY_PATH[_path(m.key)] in concerns]
    mistakes += [m for m in _missing(values, needs) if m.key not in wrong]
    for found in consistency.find(config):
        keys = [BY_PATH[_path(name)] for name in found.keys]
        if not wrong & set(found.keys) and all(key in concerns for key in keys):
            mistakes.append(Mistake(_origin(values, keys), found.keys[0], found.text))
    if mistakes:
        raise ConfigError(mistakes)
    return Settled(config, values)


def _origin(values: Mapping[Key, Value], keys: Sequence[Key]) -> Origin:
    """Where to look: at the first key, or where that has its default, at the last of the others."""
    origins = [values[key].origin for key in keys]
    if origins[0] is not DEFAULT:
        return origins[0]
    return max(origins, key=lambda origin: (origin.rank, origin.line))


def _without_outranked(values: dict[Key, Value]) -> dict[Key, Value]:
    """What is said of all workers in a later place wins over what an earlier one says of a pool:
    ``--max-batch 8`` means 8, whatever the file has under ``pools``."""
    settled = dict(values)
    for key, (value, origin) in values.items():
        general = BY_PATH.get(("worker", key.path[-1])) if key.path[0] == "pools" else None
        if general is not None and value is not None:
            above = values[general].origin
            if above.rank > origin.rank:
                settled[key] = Value(None, above)
    return settled


def _missing_files(values: Mapping[Key, Value]) -> list[Mistake]:
    return [
        Mistake(origin, key.name, f"got {value!r}, which is no file; expected one to read")
        for key, (value, origin) in values.items()
        if key.is_file and value is not None and not _is_file(value)
    ]


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # too long for a name
        return False


def _missing(values: Mapping[Key, Value], needs: Collection[str]) -> list[Mistake]:
    absent = [BY_PATH[_path(name)] for name in needs if values[BY_PATH[_path(name)]].value is None]
    ways = {key: f"{key.flag} or {key.variable}" if key.flag else key.variable for key in absent}
    return [
        Mistake(values[key].origin, key.name, f"missing; set {way}, or the key in a file")
        for key, way in ways.items()
    ]


def _tree(values: Mapping[Key, Value]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, (value, _) in values.items():
        section = tree
        for name in key.path[:-1]:
            section = section.setdefault(name, {})
        section[key.path[-1]] = value
    return tree


def _path(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))
