"""Codex and Claude Code do a task of three tool calls with Baton's router and a scripted model.

The task makes a file, reads it and appends to it. Each turn's prompt must extend the last prompt
and what the model has written, token for token: then a prefix cache has all but the new messages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.agents.clients import agent, run
from tests.router.anthropic.agent_templates import Call, Written
from tests.router.scripted_model import MODEL, ScriptedRouter, scripted_router

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(180)]

PAGE = Path(__file__).parents[3] / "docs/api.md"
TASK = "Write notes.txt, read it and append to it."
DONE = "notes.txt has two lines."


def steps(make: Call, read: Call, append: Call) -> list[Written]:
    """What the model writes: text beside calls and calls alone, after reasoning."""
    return [
        Written("First I make the file.", "I make it.", [make]),
        Written("Now I read it.", "", [read]),
        Written("Now I append to it.", "I append.", [append]),
        Written("That is all.", DONE, []),
    ]


def check(router: ScriptedRouter, folder: Path, results: list[str]) -> None:
    """Check the file, the status of each request and the prompts; ``results``: what each prompt
    after the first has at its end."""
    assert (folder / "work/notes.txt").read_text() == "one\ntwo\n"
    shown = [f"{e.method} {e.path} {e.status}" for e in router.exchanges]
    assert all(e.status == 200 for e in router.exchanges), shown
    assert len(router.turns) == 4, shown
    assert all(past == kept for past, kept in router.kept()), router.kept()
    for turn, result in zip(router.turns[1:], results, strict=True):
        assert result in router.text(turn.prompt[-1500:])


def documented(language: str, url: str) -> str:
    """Return the example of ``docs/api.md`` in this language, for this server."""
    [example] = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return str(example).replace("http://localhost:8000", url).replace("my-model", MODEL)


async def test_codex(tmp_path: Path) -> None:
    codex = agent("codex")
    commands = [
        "printf 'one\\n' > notes.txt; echo made it",
        "cat notes.txt",
        "echo two >> notes.txt",
    ]
    script = steps(*[("exec_command", {"cmd": command}) for command in commands])
    folder = tmp_path / "home/.codex"
    folder.mkdir(parents=True)
    async with scripted_router(tmp_path, script) as router:
        (folder / "config.toml").write_text(documented("toml", router.url))
        command = [codex, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK]
        said = await run(command, tmp_path, BATON_KEY="none")
    assert DONE in said
    check(router, tmp_path, ["made it", "one", "exited with code 0"])


async def test_claude_code(tmp_path: Path) -> None:
    claude = agent("claude")
    path = str(tmp_path / "work/notes.txt")
    changed = {"old_string": "one\n", "new_string": "one\ntwo\n"}
    script = steps(
        ("Write", {"file_path": path, "content": "one\n"}),
        ("Read", {"file_path": path}),
        ("Edit", {"file_path": path, **changed}),
    )
    async with scripted_router(tmp_path, script) as router:
        exports = re.findall(r"(\w+)=(\S+)", documented("sh", router.url))
        command = [claude, "-p", "--allowedTools", "Write,Read,Edit", "--", TASK]
        said = await run(command, tmp_path, **dict(exports))
    assert DONE in said
    check(router, tmp_path, ["created successfully", "one", "updated successfully"])
