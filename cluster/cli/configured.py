"""The configuration of a command, or its end with every mistake and status 2."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping

import typer

from cluster.config.keys import KEYS, Key
from cluster.config.mistakes import ConfigError
from cluster.config.settle import Flags, Settled, settle

# MERGED cluster.config.strange
# Variables that nobody reads, and whose names are nearly those of ones that somebody does.

_PREFIX = "BATON_"
_OTHERS = ("API_KEY", "CONFIG", "DIE_WITH_PARENT", "HOME", "LOCK_FD", "RUN_DIR")
_SIMILAR = 0.75  # difflib's ratio: of four letters one is another, or two are swapped
# What Kubernetes sets in a pod for a service "baton", or "baton-" and anything.
_SERVICE = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_VALUES = ("tcp://", "udp://", "sctp://")


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A line for each, with the name that was meant, and without its value."""
    known = [key.variable.removeprefix(_PREFIX) for key in KEYS] + list(_OTHERS)
    lines = []
    for variable, value in sorted(environ.items()):
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in known:
            continue
        if _SERVICE.fullmatch(name) or value.startswith(_SERVICE_VALUES):
            continue
        if close := difflib.get_close_matches(name.upper(), known, n=1, cutoff=_SIMILAR):
            lines.append(f"nobody reads {variable}; did you mean {_PREFIX}{close[0]}?")
    return lines


MISUSED = 2


def settled(flags: Flags, concerns: Collection[Key], needs: Collection[str] = ()) -> Settled:
    """``needs``: names of keys that must not be null."""
    for line in misspelt(os.environ):
        typer.echo(f"baton: warning: {line}", err=True)
    try:
        return settle(flags, os.environ, concerns, needs)
    except ConfigError as e:
        typer.echo(_laid_out(f"baton: {e}", sys.stderr.isatty()), err=True)
        raise typer.Exit(MISUSED) from None


def _laid_out(text: str, terminal: bool) -> str:
    """On a terminal words stay whole, and a mistake's further lines stand under its first."""
    if not terminal:
        return text
    fill = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, subsequent_indent=" " * 6, break_on_hyphens=False
    )
    return "\n".join(fill.fill(line) for line in text.splitlines())


# MERGED cluster.commands.failing
# How a command says that it cannot do what it was asked for.


def failure(error: Exception) -> typer.Exit:
    """Says why on standard error; raise what it returns."""
    typer.echo(f"baton: {error}", err=True)
    return typer.Exit(1)
