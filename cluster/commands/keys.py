"""`baton keys`: API keys."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Draw API keys.")


@app.callback()
def keys() -> None:
    """Draw API keys."""


@app.command()
def new(tenant: Annotated[str, typer.Argument(help="Whose key it is to be.")]) -> None:
    """Draw a key. It is shown once: the line for the file of keys holds its digest alone."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    typer.echo(f"key for {tenant}, to hand over (it is kept nowhere):\n  {key}\n")
    typer.echo("line for the file that --api-keys names:")
    typer.echo(f"  sha256:{hashlib.sha256(key.encode()).hexdigest()}: {json.dumps(tenant)}")
