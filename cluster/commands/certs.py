"""`baton certs`: the certificates of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.failing import failure

certs_app = typer.Typer(
    no_args_is_help=True, help="Make the certificates of a cluster (mutual TLS)."
)

Folder = Annotated[Path, typer.Argument(help="Folder of the cluster's CA.", metavar="DIR")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="DNS name or IP address of the node; several are possible."),
]

Name = Annotated[
    str | None,
    typer.Option(help="DNS name of the whole cluster, which it proves, too (security.tls.name)."),
]


@certs_app.command("init")
def init_certificates(folder: Folder, host: Hosts = None, name: Name = None) -> None:
    """Make a CA, and a certificate for a first node (this machine's loopback by default)."""
    from cluster import certs

    _make(lambda: certs.init(folder, host or [], name))
    typer.echo("\nca.key stays here, apart: it is needed to add nodes, and by no process.")


@certs_app.command()
def node(folder: Folder, host: Hosts = None, name: Name = None) -> None:
    """Make a certificate for another node."""
    from cluster import certs

    _make(lambda: certs.node(folder, host or [], name))


@certs_app.command()
def renew(
    folder: Folder, name: Annotated[str, typer.Argument(help="The node's files, without .pem.")]
) -> None:
    """Replace a node's certificate and key, for the same hosts; no process need be restarted."""
    from cluster import certs

    _make(lambda: certs.renew(folder, name.removesuffix(".pem")))


def _make(work: Callable[[], list[Path]]) -> None:
    from protocol.errors import StartupError

    try:
        for path in work():
            typer.echo(f"wrote {path}")
    except StartupError as e:
        raise failure(e) from None
