"""The help of `baton` and its commands: plain text of at most 80 columns, with a section for each
part of the configuration. The names of options are never cut."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

_MAX_NAME = 24  # columns of the names; a longer one has its text in the next line
_MAX_CHOICES = 60  # columns of a name with its choices; more of them are listed in the text
_TYPE = re.compile(r" <(.+)>$")
_SHORT_TYPES = {
    "str": "TEXT",
    "list[str]": "TEXT",
    "path": "FILE",
    "int": "N",
    "int range": "N",
    "float": "X",
    "float range": "X",
}
"""Types as the options of the configuration name theirs; choices are listed as they are."""


class HelpCommand(TyperCommand):
    """A command whose help lists its options in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


class HelpGroup(TyperGroup):
    """A group of commands, whose help has the first paragraph of each."""

    command_class = HelpCommand

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        rows = [(each.name or "", _first_paragraph(each.help)) for each in found if each]
        with formatter.section("Commands"):
            formatter.write_dl(rows, col_max=_MAX_NAME)


def _write_parameters(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    """Write the arguments, the command's own options, and those of each section."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is None:  # a hidden option
            continue
        name, text = record
        argument = parameter.param_type_name == "argument"
        title = getattr(parameter, "rich_help_panel", None) or (
            "Arguments" if argument else "Options"
        )
        name = _TYPE.sub("" if argument else _short_type, name)
        if len(name) > _MAX_CHOICES:
            name, _, choices = name.rpartition(" ")
            text = f"{text} One of {', '.join(choices.split('|'))}."
        sections.setdefault(title, []).append((name, text))
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows, col_max=_MAX_NAME)


def _short_type(found: re.Match[str]) -> str:
    return f" {_SHORT_TYPES.get(found[1], found[1])}"


def _first_paragraph(text: str | None) -> str:
    return (text or "").partition("\n\n")[0]
