"""Flags of a command, one for each key. Their texts are checked together with all other values.

The modules of ``cluster.cli`` decorate their commands with ``with_config_flags``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.config.keys import CONFIG_KEYS, ConfigKey
from cluster.config.resolve import CommandFlags
from cluster.config.schema import REMOVED_KEYS

_FILE = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config", envvar="BATON_CONFIG", metavar="FILE", help="Configuration, YAML."
        ),
    ],
)


def with_config_flags(
    keys: Collection[ConfigKey], rename: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command ``--config`` and the flags of ``keys``.

    The command gets them as its first argument, a ``CommandFlags``. ``rename`` maps names of keys
    to other flags. Flags of removed keys are hidden options, so that their use can be explained.
    """
    names = {k: (rename or {}).get(k.name, k.flag) for k in CONFIG_KEYS if k in keys}
    flags = {_parameter_name(flag): (key, flag) for key, flag in names.items() if flag is not None}
    removed = {_parameter_name(old.flag): old for old in REMOVED_KEYS}

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*, config: Path | None, **given: Any) -> None:
            used = [old for name, old in removed.items() if given.pop(name) is not None]
            texts = {}
            for name, (key, flag) in flags.items():
                value = given.pop(name)
                if value is not None:
                    texts[key] = _as_text(flag, value)
            command(CommandFlags(config, texts, used), **given)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        made = [_option(name, key, flag) for name, (key, flag) in flags.items()]
        made += [_hidden_option(name, old.flag) for name, old in removed.items()]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, _FILE, *made]]
        run.__dict__.pop("__wrapped__")  # typer would read the annotations of the wrapped function
        run.__dict__["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return wrap


def _parameter_name(flag: str | None) -> str:
    return (flag or "").strip("-").replace("-", "_")


def _as_text(flag: str, value: str | bool) -> tuple[str, str]:
    if isinstance(value, bool):
        return (flag if value else f"--no-{flag[2:]}"), str(value).lower()
    return flag, value


def _option(name: str, key: ConfigKey, flag: str) -> inspect.Parameter:
    switch = key.kinds == (bool,)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if switch else flag,
        metavar=None if switch else key.metavar,
        help=_help(key),
        show_default=False,
        rich_help_panel=_panel(key),
    )
    kind: Any = Annotated[bool | None if switch else str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _hidden_option(name: str, flag: str) -> inspect.Parameter:
    kind: Any = Annotated[str | None, typer.Option(flag, hidden=True)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _help(key: ConfigKey) -> str:
    default = key.field.default
    text = key.field.description or ""
    shown = f"{default:g}" if isinstance(default, float) else default
    shown = "true" if default is True else shown
    return text if default is None or default is False else f"{text} [{shown}]"


def _panel(key: ConfigKey) -> str:
    if len(key.path) == 1:
        return "Options"
    return key.path[0].upper() if key.path[0] == "kv" else key.path[0].capitalize()
