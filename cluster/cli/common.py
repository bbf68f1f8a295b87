"""Loads the configuration of a command, reports errors, and warns of misspelt variables."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import typer

from cluster.config.keys import CONFIG_KEYS, ConfigKey
from cluster.config.mistakes import ConfigError
from cluster.config.resolve import CommandFlags, ResolvedConfig, resolve_config
from protocol.errors import StartupError, UsageError

EXIT_USAGE = 2

CaFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        help="CA of the routers' HTTPS certificate, in addition to the system's CAs or those in the"
        " file that SSL_CERT_FILE names. Not needed for a cluster on this machine.",
    ),
]

_PREFIX = "BATON_"
_OTHERS = ("API_KEY", "CONFIG", "DIE_WITH_PARENT", "HOME", "KEPT_LOGS", "LOCK_FD", "RUN_DIR")
_SIMILAR = 0.75  # difflib's ratio: of four letters one differs, or two are swapped
# Variables that Kubernetes sets in a pod for services named "baton" or "baton-...".
_SERVICE = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_VALUES = ("tcp://", "udp://", "sctp://")


def load_config(
    flags: CommandFlags,
    concerns: Collection[ConfigKey],
    needs: Collection[str] = (),
    *,
    tolerant: bool = False,
) -> ResolvedConfig:
    """Return the configuration of a command, or print all its mistakes and exit with status 2.

    ``concerns``: the keys that the command reads. ``needs``: names of keys that must not be null.
    If ``tolerant``, mistakes that do not concern it are warnings.
    Prints a warning for each misspelt environment variable."""
    for line in misspelt_variables(os.environ):
        typer.echo(f"baton: warning: {line}", err=True)
    try:
        resolved = resolve_config(flags, os.environ, concerns, needs, tolerant=tolerant)
    except ConfigError as e:
        typer.echo(_wrap(f"baton: {e}", sys.stderr.isatty()), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    for mistake in resolved.tolerated:
        typer.echo(f"baton: warning: {mistake}", err=True)
    return resolved


def _wrap(text: str, terminal: bool) -> str:
    """Wrap lines at words on a terminal, and indent the further lines of each mistake."""
    if not terminal:
        return text
    fill = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, subsequent_indent=" " * 6, break_on_hyphens=False
    )
    return "\n".join(fill.fill(line) for line in text.splitlines())


def report_failure(error: Exception) -> typer.Exit:
    """Print the error on standard error; return an exit for the caller to raise, with status 2 for
    a UsageError and 1 for any other error."""
    typer.echo(f"baton: {error}", err=True)
    return typer.Exit(error.exit_status if isinstance(error, StartupError) else 1)


def parse_router_url(text: str) -> str:
    """Return the URL of a router as ``--url`` gives it, without a slash or the path of its page.
    Raises UsageError if it is none."""
    if "://" not in text and ":" in text and "@" not in text:
        raise UsageError(f"--url {text}: the scheme is missing; give http://{text}")
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError("--url must be http://HOST:PORT or https://HOST:PORT, with nothing else")
    root = f"{parts.scheme}://{parts.netloc}"
    if parts.path.strip("/") not in ("", "ui"):
        raise UsageError(f"--url: give the URL without a path: {root}")
    return root


def print_json(value: Any) -> None:
    """Print a value of msgspec structs, dataclasses and builtins as indented JSON."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each BATON_ variable that no key has but whose name is close to one.

    Warnings never contain the variable's value, which may be a secret."""
    known = [key.variable.removeprefix(_PREFIX) for key in CONFIG_KEYS] + list(_OTHERS)
    lines = []
    for variable, value in sorted(environ.items()):
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in known:
            continue
        if _SERVICE.fullmatch(name) or value.startswith(_SERVICE_VALUES):
            continue
        if close := difflib.get_close_matches(name.upper(), known, n=1, cutoff=_SIMILAR):
            lines.append(
                f"{variable} is unknown and has no effect; did you mean {_PREFIX}{close[0]}?"
            )
    return lines


def write_file(path: Path, content: str | bytes) -> None:
    """Write a result. Raises StartupError if the file cannot be written."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as e:
        raise StartupError(f"{path} cannot be written: {e.strerror}") from None
