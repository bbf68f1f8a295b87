"""`baton keys`: API keys."""

from __future__ import annotations

from typing import Annotated

import typer

keys_app = typer.Typer(no_args_is_help=True, help="Draw API keys.")


@keys_app.callback()
def keys() -> None:
    """Draw API keys."""


@keys_app.command()
def new(tenant: Annotated[str, typer.Argument(help="Whose key it is to be.")]) -> None:
    """Draw a key. It is shown once: the line for the file of keys holds its digest alone."""
    from cluster import api_keys

    key = api_keys.draw()
    typer.echo(f"key for {tenant}, to hand over (it is kept nowhere):\n  {key}\n")
    typer.echo("line for the file that --api-keys names:")
    typer.echo(f"  {api_keys.line(key, tenant)}")
