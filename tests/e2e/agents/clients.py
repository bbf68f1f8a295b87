"""The agents under test, as npm installs them: unmodified, in an empty home.

``make test-system`` installs into ``.venv/agents`` what ``package-lock.json`` beside this file
pins, where npm is installed and reaches a registry. Without them the tests skip, also in CI.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest

BIN = Path(sys.prefix) / "agents/node_modules/.bin"
LIMIT_S = 120.0


def agent(name: str) -> str:
    """Return the path of an agent. Skips the test if it is not installed."""
    path = BIN / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: install npm, then make test-system")
    return str(path)


async def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command in ``folder``/work, with ``folder``/home as its home and no other environment
    than is given. Return its output; fail if it fails or takes too long."""
    home, work = folder / "home", folder / "work"
    home.mkdir(exist_ok=True)
    work.mkdir()
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(home), **environment}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=work, env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        process.kill()
        output, errors = await process.communicate()
    shown = f"{output.decode()[-3000:]}\n{errors.decode()[-3000:]}"
    assert process.returncode == 0, shown
    return output.decode()
