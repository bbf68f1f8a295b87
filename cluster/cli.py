"""`baton`: its commands, each in a file of its own that imports what is heavy when it is called."""

from __future__ import annotations

import typer

from bench.serve.command import app as bench
from cluster.commands import certs
from cluster.commands.down import down
from cluster.commands.router import router
from cluster.commands.status import status
from cluster.commands.up import up
from cluster.commands.worker import worker

app = typer.Typer(
    name="baton",
    help="Serves large language models from two pools of workers: prefill and decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they would show secrets
)

for command in (up, down, status, worker, router):
    app.command()(command)
app.add_typer(bench)
app.add_typer(certs.app, name="certs")


if __name__ == "__main__":
    app()
