"""`baton doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags


@configured(keys.UP)
def doctor(
    flags: Flags,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Look for whatever would keep a cluster from starting, and say what to do about it."""
    config = settled(flags, keys.UP).config
    from cluster.config import assemble
    from cluster.doctor.command import run
    from cluster.doctor.wanted import of_launch

    wanted = of_launch(assemble.launch(config), config.model.path, port_moves=False)
    raise typer.Exit(run(wanted, as_json=json))
