"""How a command says that it cannot do what it was asked for."""

from __future__ import annotations

import typer


def failure(error: Exception) -> typer.Exit:
    """Says why on standard error; raise what it returns."""
    typer.echo(f"baton: {error}", err=True)
    return typer.Exit(1)
