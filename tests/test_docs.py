"""Pages name commands, options, targets, files and headings that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from cluster.cli.main import app
from cluster.config.schema import Config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]

BATON = typer.main.get_command(app)


def leaves(command: Any = BATON, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All commands that do something, as words after ``baton``."""
    if isinstance(command, TyperGroup):
        if path and command.invoke_without_command:
            yield path  # a command of its own
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path


def spans(text: str) -> list[str]:
    """What is set as code: lines of blocks, and words between backticks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    apart = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`]+)`", apart)


def calls(text: str) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Each call of ``baton``: its words, and the options it names."""
    for span in spans(text):
        if not re.match(r"baton [a-z]", span):
            continue
        words = shlex.split(span.replace("\\|", "|"), comments=True)[1:]
        yield tuple(words), [w.partition("=")[0] for w in words if w.startswith("--")]


def resolve(words: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    command: Any = BATON
    path: tuple[str, ...] = ()
    while isinstance(command, TyperGroup) and words[len(path) :]:
        name = words[len(path)]
        if name.startswith("-") and command.invoke_without_command:
            break  # options of the group itself
        assert name in command.commands, f"baton {' '.join(words)}"
        command, path = command.commands[name], (*path, name)
    return command, path


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_and_their_options_exist(page: Path) -> None:
    for words, given in calls(page.read_text()):
        command, path = resolve(words)
        assert set(given) <= options(command), f"baton {' '.join(path)}: {given}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_options_by_themselves_exist(page: Path) -> None:
    known = {name for path in leaves() for name in options(resolve(path)[0])}
    for span in spans(page.read_text()):
        if span.startswith("--"):
            assert span.split()[0].partition("=")[0] in known | OF_BENCHMARKS, span


OF_BENCHMARKS = {"--dynamo-python", "--minutes", "--queue-ms", "--trace"}
"""Of `python -m bench.NAME`."""


def test_readme_names_every_command() -> None:
    told = {resolve(words)[1] for words, _ in calls((ROOT / "README.md").read_text())}
    assert told >= set(leaves())


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_targets_of_make_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for span in spans(page.read_text()):
        if match := re.match(r"make ([a-z]+)", span):
            assert match[1] in targets, span


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_example_of_a_configuration_is_one() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = re.findall(r"^```yaml\n(model:.*?)^```", text, re.M | re.S)
    assert blocks
    for block in blocks:
        Config.model_validate(yaml.safe_load(block))
