"""`baton init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.failing import failure

_NEXT = """\
next
  edit {node}/baton.yaml (model, pools) and, under deploy/, ray-local.yaml, ray-aws.yaml or
  ray-gcp.yaml, which say on their first lines what else to do; then
  ray up FILE.yaml
  ray exec FILE.yaml '~/baton/run baton up --address auto --config ~/baton/baton.yaml'

then
  curl --cacert {folder}/ca.pem https://{host}:8000/v1/models -H 'Authorization: Bearer KEY'"""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for it all.")],
    redis_url: Annotated[
        str,
        typer.Option(
            envvar="BATON_REDIS_URL", help="The cluster's Redis, which every node reaches."
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="DNS name or address that clients reach routers by; several are possible."
        ),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose the first API key is.")] = "default",
    name: Annotated[
        str, typer.Option(help="DNS name that all processes of the cluster prove to each other.")
    ] = "baton.cluster",
) -> None:
    """Make what the nodes of a cluster share: certificates, keys, secrets, a configuration."""
    from cluster import init as run
    from protocol.errors import StartupError

    try:
        made = run.init(folder, host or [], redis_url, tenant, name)
    except StartupError as e:
        raise failure(e) from None
    typer.echo(f"{folder}/ca.key, ca.pem  the CA; its key stays here, and signs what is renewed")
    typer.echo(f"{made.node}/  what every node gets as ~/baton; keep it to yourself\n")
    typer.echo(f"API key of {tenant}, shown this once:\n  {made.api_key}\n")
    typer.echo(_NEXT.format(folder=folder, node=made.node, host=(host or [name])[0]))
