"""Commands as files under deploy/ have them: in comments, in lists, over several lines."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from tests.test_docs import options, resolve

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"

_BATON = re.compile(r"(?<![\w.-])baton (?=([a-z]+(?: .*)?))")


def lines(text: str) -> list[str]:
    """Without the marks of comments, and what goes on with a backslash in one."""
    bare = re.sub(r"^\s*# ?", "", text, flags=re.M)
    return re.sub(r"\\\n\s*", "", bare).replace("`", "\n").splitlines()


def baton_calls(text: str) -> list[list[str]]:
    """Words after ``baton`` of every call of it."""
    found = []
    for line in lines(text):
        calls = [_split(match[1]) for match in _BATON.finditer(line)]
        found += [words for words in calls if words and words[0] in known()]
    return found


def known() -> set[str]:
    command, _ = resolve(())
    return set(command.commands)


def check_baton(words: list[str]) -> None:
    """Its command exists, and every option that it names."""
    command, _ = resolve(tuple(words))
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= options(command), f"baton {' '.join(words)}"


def ray_starts(commands: list[str]) -> list[list[str]]:
    """Words after ``ray start`` of every call of it."""
    text = "\n".join(lines("\n".join(commands)))
    return [_split(match) for match in re.findall(r"\bray start (.*)", text)]


def check_ray_start(words: list[str]) -> dict[str, object]:
    """What Ray's own command line makes of them; it raises for options that it does not have."""
    from ray.scripts import scripts  # it takes seconds, and brings warnings

    return scripts.start.make_context("ray start", list(words)).params


def check_shell(text: str) -> None:
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # it ends within the quotes that the call stands in
        return shlex.split(text.replace("'", " ").replace('"', " "), comments=True)
