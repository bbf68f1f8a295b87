"""The configuration of a command, or its end with every mistake and status 2."""

from __future__ import annotations

import os
from collections.abc import Collection

import typer

from cluster.config.keys import Key
from cluster.config.layers import Flags
from cluster.config.mistakes import ConfigError
from cluster.config.settle import Settled, settle

MISUSED = 2


def settled(flags: Flags, concerns: Collection[Key], needs: Collection[str] = ()) -> Settled:
    """``needs``: names of keys that must not be null."""
    try:
        return settle(flags, os.environ, concerns, needs)
    except ConfigError as e:
        typer.echo(f"baton: {e}", err=True)
        raise typer.Exit(MISUSED) from None
