"""Assembles `baton` from its commands. Commands import heavy modules in their bodies only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from cluster.cli import credentials, plan
from cluster.cli.common import report_failure
from cluster.cli.credentials import init
from cluster.cli.help_format import HelpCommand, HelpGroup
from cluster.cli.inspect import config, doctor, status
from cluster.cli.lifecycle import down, scale, up
from cluster.cli.logs import logs, ls
from cluster.cli.monitoring import monitoring
from cluster.cli.processes import autoscale, router, worker
from cluster.cli.simulate import simulate
from cluster.local.disk_errors import FULL_DISK, disk_error_text
from protocol.errors import StartupError


class _Commands(HelpGroup):
    """Reports a full or read-only disk as an error of the command, whichever it is."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            text = disk_error_text(error)
            if text is None or error.errno not in FULL_DISK:
                raise
            raise report_failure(StartupError(text)) from None


def _paragraphs(command: Callable[..., None]) -> str:
    """Return a command's docstring with each paragraph in one line, so that the terminal's width
    decides where lines end."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


app = typer.Typer(
    name="baton",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # the help is that of help_format
    pretty_exceptions_show_locals=False,  # they would show secrets
)

for command in (init, up, down, scale, ls, status, logs, monitoring, config, doctor):
    app.command(cls=HelpCommand, help=_paragraphs(command))(command)
for command in (worker, router, autoscale, simulate):
    app.command(cls=HelpCommand, help=_paragraphs(command))(command)
app.add_typer(credentials.certs_app, name="certs")
app.add_typer(credentials.keys_app, name="keys")
app.add_typer(plan.app, name="plan")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {version('baton')}")
        raise typer.Exit


@app.callback()
def baton(
    _show: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Serves large language models from two pools of workers: prefill and decode."""


if __name__ == "__main__":
    app()
