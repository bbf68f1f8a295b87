"""`baton autoscale`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.failing import failure
from cluster.commands.settling import settled
from cluster.config import keys
from cluster.config.flags import configured
from cluster.config.layers import Flags

_NEEDS = ("redis.url", "security.token")


@configured(keys.AUTOSCALE)
def autoscale(
    flags: Flags,
    advise: Annotated[
        bool, typer.Option("--advise", help="Only say what would be done, whatever the mode is.")
    ] = False,
    metrics_host: Annotated[str, typer.Option(help="Address of its own metrics.")] = "127.0.0.1",
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of its own metrics; 0: any.")
    ] = 0,
) -> None:
    """Run the autoscaler in the foreground, without Ray: it lends workers from one pool to the
    other, and says what else it wants. Needs BATON_TOKEN."""
    config = settled(flags, keys.AUTOSCALE, _NEEDS).config
    import msgspec

    from cluster import standalone
    from cluster.config import assemble
    from protocol.errors import StartupError

    settings = assemble.autoscaler(config)
    if settings.mode == "off":
        typer.echo("autoscaler.mode is off: it advises; --autoscaler-mode act has it lend workers")
    settings = msgspec.structs.replace(
        settings,
        mode="act" if settings.mode == "act" and not advise else "advise",
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    try:
        raise typer.Exit(standalone.run_autoscaler(settings))
    except StartupError as e:
        raise failure(e) from None
