"""The configuration that counts, and where each of its values is from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster.config import contradictions, layers
from cluster.config.keys import BY_PATH, KEYS, Key
from cluster.config.layers import Flags, Value
from cluster.config.mistakes import DEFAULT, ConfigError, Mistake, Origin
from cluster.config.schema import Config


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
    given = [layers.of_environment(environ), layers.of_flags(flags)]
    if flags.file is not None:
        given.insert(0, layers.of_file(flags.file))
    mistakes = [mistake for layer in given for mistake in layer.mistakes]
    defaults = {key: Value(key.field.default, DEFAULT) for key in KEYS}
    values = _without_outranked({**defaults, **layers.winners(given)})
    config = Config.model_validate(_tree(values))
    wrong = {mistake.key for mistake in mistakes}
    mistakes += [m for m in _missing_files(values) if BY_PATH[_path(m.key)] in concerns]
    mistakes += [m for m in _missing(values, needs) if m.key not in wrong]
    for found in contradictions.find(config):
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
