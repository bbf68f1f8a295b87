"""`baton init`, `baton certs` and `baton keys`: credentials of a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.common import report_failure
from cluster.cli.help_format import HelpCommand, HelpGroup
from protocol.errors import StartupError

certs_app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make the certificates of a cluster (mutual TLS).",
)

Folder = Annotated[Path, typer.Argument(help="Folder of the cluster's CA.", metavar="DIR")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="DNS name or IP address of the node; may be repeated."),
]

Name = Annotated[
    str | None,
    typer.Option(
        help="DNS name of the whole cluster that the certificate also proves (security.tls.name)."
    ),
]


@certs_app.command("init", cls=HelpCommand)
def init_certificates(folder: Folder, host: Hosts = None, name: Name = None) -> None:
    """Make a CA and the first node's certificate (by default for this machine's loopback)."""
    from cluster.credentials import certificates

    _make(lambda: certificates.create_ca(folder, host or [], name))
    typer.echo(
        "\nKeep ca.key private and off the nodes: only `baton certs` needs it, to make and"
        " renew certificates."
    )


@certs_app.command(cls=HelpCommand)
def node(folder: Folder, host: Hosts = None, name: Name = None) -> None:
    """Make a certificate for another node."""
    from cluster.credentials import certificates

    _make(lambda: certificates.create_node_certificate(folder, host or [], name))


@certs_app.command(cls=HelpCommand)
def renew(
    folder: Folder, name: Annotated[str, typer.Argument(help="The node's files, without .pem.")]
) -> None:
    """Replace a node's certificate and key, for the same hosts. No restart is needed."""
    from cluster.credentials import certificates

    _make(lambda: certificates.renew_node_certificate(folder, name.removesuffix(".pem")))


def _make(work: Callable[[], list[Path]]) -> None:
    try:
        for path in work():
            typer.echo(f"wrote {path}")
    except StartupError as e:
        raise report_failure(e) from None


keys_app = typer.Typer(
    cls=HelpGroup, no_args_is_help=True, rich_markup_mode=None, help="Make API keys."
)


@keys_app.callback()
def keys() -> None:
    """Make API keys."""


@keys_app.command(cls=HelpCommand)
def new(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant that gets the key.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What the key allows: generate (the default), monitor (/metrics, /sd, /ui) or"
            " admin"
            " (both); may be repeated."
        ),
    ] = None,
) -> None:
    """Make an API key. It is shown once: the line for the key file contains only its digest."""
    from cluster.credentials import init

    if unknown := set(scope or ()) - set(init.KEY_SCOPES):
        expected = ", ".join(init.KEY_SCOPES)
        raise typer.BadParameter(f"{min(unknown)!r} is not a scope; expected {expected}")
    key = init.draw_api_key()
    typer.echo(f"API key of {tenant} (shown only now, and stored nowhere):\n  {key}\n")
    typer.echo("line for the file that --api-keys names (routers notice the change):")
    typer.echo(f"  {init.api_key_line(key, tenant, scope or ())}")


_NEXT = """\
next
  edit {node}/baton.yaml (model, pools) and, under deploy/, ray-local.yaml, ray-aws.yaml or
  ray-gcp.yaml, which say on their first lines what else to do; then
  ray up FILE.yaml
  ray exec FILE.yaml '~/baton/run baton up --address auto --config ~/baton/baton.yaml'

then
  curl --cacert {folder}/ca.pem https://{host}:8000/v1/models -H 'Authorization: Bearer KEY'"""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for all these files.")],
    redis_url: Annotated[
        str,
        typer.Option(
            envvar="BATON_REDIS_URL", help="The cluster's Redis, which every node reaches."
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or address at which clients reach routers; may be repeated."),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant that gets the first API key.")] = "default",
    name: Annotated[
        str, typer.Option(help="DNS name that all processes of the cluster prove to each other.")
    ] = "baton.cluster",
) -> None:
    """Make what the nodes of a cluster share: certificates, keys, secrets, a configuration. A
    token in HF_TOKEN, with which nodes download models, is among the secrets."""
    from cluster.credentials import init as credentials

    try:
        made = credentials.create_cluster_folder(
            folder, host or [], redis_url, tenant, name, os.environ.get("HF_TOKEN", "").strip()
        )
    except StartupError as e:
        raise report_failure(e) from None
    typer.echo(
        f"{folder}/ca.key, ca.pem  the CA; keep ca.key on this machine: it signs renewed"
        " certificates"
    )
    typer.echo(f"{made.node}/  copied to every node as ~/baton; keep it private\n")
    typer.echo(f"API key of {tenant} (shown only now):\n  {made.api_key}\n")
    typer.echo(_NEXT.format(folder=folder, node=made.node, host=(host or [name])[0]))
