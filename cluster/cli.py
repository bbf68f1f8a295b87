"""`baton`: its commands, each in a file of its own that imports what is heavy when it is called."""

from __future__ import annotations

import typer

from cluster.commands.down import down
from cluster.commands.router import router
from cluster.commands.up import up
from cluster.commands.worker import worker

app = typer.Typer(
    name="baton",
    help="Serves large language models from two pools of workers: prefill and decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they would show secrets
)

for command in (up, down, worker, router):
    app.command()(command)


if __name__ == "__main__":
    app()
