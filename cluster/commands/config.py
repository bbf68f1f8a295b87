"""`baton config`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.settling import settled
from cluster.config import keys, show
from cluster.config.flags import configured
from cluster.config.layers import Flags


@configured(keys.UP)
def config(
    flags: Flags,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file, for editors.")
    ] = False,
) -> None:
    """Print the configuration that counts, with where each value is from."""
    if schema:
        typer.echo(show.schema())
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    text = show.render(settled(flags, keys.UP).values, color=console.is_terminal)
    console.print(text, end="")
