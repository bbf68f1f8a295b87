"""The configuration of a command, or its end with every mistake and status 2."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Collection

import typer

from cluster.config.keys import Key
from cluster.config.layers import Flags
from cluster.config.mistakes import ConfigError
from cluster.config.settle import Settled, settle
from cluster.config.strange import misspelt

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
