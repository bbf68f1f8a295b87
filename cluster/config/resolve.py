"""The effective configuration: the value that counts for each key, and the place it comes from.

    default < file < environment < flag        the later place wins, key by key

Every command calls ``resolve_config``. Each place becomes a layer, whose values are checked even
where another place wins over them. Then the merged values are checked against each other.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from cluster.config import consistency, yaml_file
from cluster.config.keys import CONFIG_KEYS, KEYS_BY_NAME, KEYS_BY_PATH, ConfigKey
from cluster.config.mistakes import (
    DEFAULT_ORIGIN,
    ConfigError,
    ConfigMistake,
    ValueOrigin,
    environment_origin,
    flag_origin,
)
from cluster.config.schema import REMOVED_KEYS, Config, RemovedKey
from cluster.config.yaml_file import WrittenValue

_MAX_SHOWN_CHARS = 80


class CommandFlags(NamedTuple):
    """The part of a command line that concerns the configuration.

    ``texts`` maps each key to the flag that sets it and its text; ``removed`` are used flags of
    keys that no longer exist."""

    file: Path | None = None
    texts: Mapping[ConfigKey, tuple[str, str]] = {}
    removed: Sequence[RemovedKey] = ()


class ConfigValue(NamedTuple):
    """A checked value of one key."""

    value: Any
    origin: ValueOrigin


class ConfigLayer(NamedTuple):
    """The values and mistakes of one place: the file, the environment or the flags."""

    values: dict[ConfigKey, ConfigValue]
    mistakes: list[ConfigMistake]


class ResolvedConfig(NamedTuple):
    """The effective configuration; ``values`` has every key."""

    config: Config
    values: dict[ConfigKey, ConfigValue]
    tolerated: Sequence[ConfigMistake] = ()  # mistakes that do not concern the command

    def is_default(self, name: str) -> bool:
        """Return whether no file, variable or flag sets the key."""
        return self.values[KEYS_BY_NAME[name]].origin == DEFAULT_ORIGIN


def resolve_config(
    flags: CommandFlags,
    environ: Mapping[str, str],
    concerns: Collection[ConfigKey] = CONFIG_KEYS,
    needs: Collection[str] = (),
    *,
    tolerant: bool = False,
) -> ResolvedConfig:
    """Return the configuration that all places give together.

    ``concerns`` are the keys that matter to the caller: contradictions between other keys, and the
    files that these name, are not looked at. ``needs`` are names of keys that must not be null.

    Raises ConfigError with all mistakes. If ``tolerant``, those that cannot concern the caller's
    keys are returned in its place."""
    layers = [environment_layer(environ), flags_layer(flags)]
    if flags.file is not None:
        layers.insert(0, file_layer(flags.file))
    mistakes = [mistake for layer in layers for mistake in layer.mistakes]
    tolerated = [m for m in mistakes if tolerant and not _may_concern(m, concerns)]
    mistakes = [mistake for mistake in mistakes if mistake not in tolerated]
    defaults = {key: ConfigValue(key.field.default, DEFAULT_ORIGIN) for key in CONFIG_KEYS}
    values = _without_outranked({**defaults, **merge_layers(layers)})
    config = Config.model_validate(_tree(values))
    wrong = {mistake.key for mistake in mistakes}
    mistakes += [m for m in _missing_files(values) if KEYS_BY_NAME[m.key] in concerns]
    mistakes += [m for m in _missing_keys(values, needs) if m.key not in wrong]
    for found in consistency.find_contradictions(config):
        keys = [KEYS_BY_NAME[name] for name in found.keys]
        if wrong.isdisjoint(found.keys) and all(key in concerns for key in keys):
            mistakes.append(ConfigMistake(_place_to_look(values, keys), found.keys[0], found.text))
    if mistakes:
        raise ConfigError(mistakes)
    return ResolvedConfig(config, values, tolerated)


def _may_concern(mistake: ConfigMistake, concerns: Collection[ConfigKey]) -> bool:
    """Return whether a mistake is about one of the keys, may be one of them misspelt, or hides what
    the file says."""
    names = [key.name for key in concerns]
    if not mistake.key:
        return mistake.origin.rank <= 1
    if mistake.key in KEYS_BY_NAME:
        return mistake.key in names
    return bool(difflib.get_close_matches(mistake.key.lower(), names, n=1, cutoff=0.6))


def must_hide(key: ConfigKey, value: Any) -> bool:
    """Whether a value is a secret. A URL without password and options is none."""
    from cluster.settings.connection import without_password

    if not key.secret or value is None:
        return False
    text = value.get_secret_value()
    return not key.name.endswith("url") or without_password(text) != text


# ---- layers ---------------------------------------------------------------------------------


def file_layer(path: Path) -> ConfigLayer:
    """Return the values and mistakes of a configuration file."""
    contents = yaml_file.read_config_file(path, str(path))
    layer = ConfigLayer({}, list(contents.mistakes))
    for key in CONFIG_KEYS:
        if key.path in contents.values:
            _add_value(layer, key, contents.values[key.path], folder=path.parent)
    _check_file_mode(layer, path)
    return layer


def environment_layer(environ: Mapping[str, str]) -> ConfigLayer:
    """Return the values and mistakes of the environment; an empty variable counts as unset."""
    layer = ConfigLayer({}, [])
    for key in CONFIG_KEYS:
        text = environ.get(key.variable, "")
        if text:
            _add_value(layer, key, _parse_text(key, text, environment_origin(key.variable)))
    for old in REMOVED_KEYS:
        if environ.get(old.variable):
            origin = environment_origin(old.variable)
            layer.mistakes.append(ConfigMistake(origin, "", old.text))
    return layer


def flags_layer(flags: CommandFlags) -> ConfigLayer:
    """Return the values and mistakes of the flags."""
    layer = ConfigLayer({}, [])
    for key, (flag, text) in flags.texts.items():
        _add_value(layer, key, _parse_text(key, text, flag_origin(flag)))
    for old in flags.removed:
        layer.mistakes.append(ConfigMistake(flag_origin(old.flag), "", old.text))
    return layer


def merge_layers(layers: Iterable[ConfigLayer]) -> dict[ConfigKey, ConfigValue]:
    """Return for each key the value of the last layer that has one."""
    return {key: value for layer in layers for key, value in layer.values.items()}


def _parse_text(key: ConfigKey, text: str, origin: ValueOrigin) -> WrittenValue:
    """Convert a text from outside YAML to the type of the key."""
    shown = "a hidden value" if key.secret else repr(text)
    if text == "null" and key.optional:
        return WrittenValue(None, shown, origin)
    try:
        value = text if key.is_text else key.adapter.validate_strings(text)
    except ValidationError:
        value = text  # fails again in ``_add_value``, which reports it
    return WrittenValue(value, shown, origin)


def _add_value(
    layer: ConfigLayer, key: ConfigKey, written: WrittenValue, folder: Path = Path()
) -> None:
    try:
        value = key.adapter.validate_python(written.value, strict=True)
    except ValidationError as e:
        text = _expectation(key, written, e)
        layer.mistakes.append(ConfigMistake(written.origin, key.name, text))
        return
    layer.values[key] = ConfigValue(_resolve_path(key, value, folder), written.origin)


def _expectation(key: ConfigKey, written: WrittenValue, error: ValidationError) -> str:
    """Describe what came and what was expected."""
    causes = [str(e["ctx"]["error"]) for e in error.errors() if e["type"] == "value_error"]
    expected = causes[0] if causes else key.expected
    if isinstance(written.value, int | float) and key.is_text and not causes:
        expected += " (put it in quotes)"
    hint = ""
    if isinstance(written.value, str) and key.choices:
        close = difflib.get_close_matches(written.value, key.choices, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
    if written.shown.startswith("'tcp://"):
        hint = "; Kubernetes sets it for a service of this name, unless enableServiceLinks is false"
    shown = written.shown
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = shown[:_MAX_SHOWN_CHARS] + "..."
    return f"got {shown}; expected {expected}{hint}"


def _resolve_path(key: ConfigKey, value: Any, folder: Path) -> Any:
    """Make a file name absolute, relative to ``folder``: that of the configuration file, or the
    working directory. The name of a model that is no folder there may be a hub id, and stays."""
    is_path = key.is_file or key.name in ("autoscaler.log", "router.usage_log", "router.access_log")
    if not isinstance(value, str) or not (is_path or key.name == "model.path"):
        return value
    try:
        path = folder.absolute() / Path(value).expanduser()
        return str(path) if is_path or path.is_dir() else value
    except (OSError, RuntimeError):  # the name is too long, or its user does not exist
        return value


def _check_file_mode(layer: ConfigLayer, path: Path) -> None:
    """Add mistakes for secrets in a file that other users may read."""
    secrets = [(k, v) for k, v in layer.values.items() if must_hide(k, v.value)]
    if secrets and path.stat().st_mode & 0o007:
        mode = f"{path.stat().st_mode & 0o777:04o}"
        text = f"contains a secret, but every user can read the file (mode {mode}): chmod 600"
        layer.mistakes.extend(ConfigMistake(v.origin, k.name, text) for k, v in secrets)


# ---- merged values --------------------------------------------------------------------------


def _place_to_look(
    values: Mapping[ConfigKey, ConfigValue], keys: Sequence[ConfigKey]
) -> ValueOrigin:
    """Return the origin to name: that of the first key, or the last one where it is a default."""
    origins = [values[key].origin for key in keys]
    if origins[0] is not DEFAULT_ORIGIN:
        return origins[0]
    return max(origins, key=lambda origin: (origin.rank, origin.line))


def _without_outranked(values: dict[ConfigKey, ConfigValue]) -> dict[ConfigKey, ConfigValue]:
    """Let a later place that sets a key for all workers win over an earlier one that sets it for a
    pool: ``--max-batch 8`` means 8, whatever the file has under ``pools``."""
    settled = dict(values)
    for key, (value, origin) in values.items():
        general = KEYS_BY_PATH.get(("worker", key.path[-1])) if key.path[0] == "pools" else None
        if general is not None and value is not None:
            above = values[general].origin
            if above.rank > origin.rank:
                settled[key] = ConfigValue(None, above)
    return settled


def _missing_files(values: Mapping[ConfigKey, ConfigValue]) -> list[ConfigMistake]:
    return [
        ConfigMistake(origin, key.name, f"got {value!r}, which is not a file")
        for key, (value, origin) in values.items()
        if key.is_file and value is not None and not _is_file(value)
    ]


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # the name is too long
        return False


def _missing_keys(
    values: Mapping[ConfigKey, ConfigValue], needs: Collection[str]
) -> list[ConfigMistake]:
    absent = [key for key in map(KEYS_BY_NAME.__getitem__, needs) if values[key].value is None]
    ways = {key: f"{key.flag} or {key.variable}" if key.flag else key.variable for key in absent}
    return [
        ConfigMistake(values[key].origin, key.name, f"missing; set {way}, or the key in a file")
        for key, way in ways.items()
    ]


def _tree(values: Mapping[ConfigKey, ConfigValue]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, (value, _) in values.items():
        section = tree
        for name in key.path[:-1]:
            section = section.setdefault(name, {})
        section[key.path[-1]] = value
    return tree
