"""litellm, unmodified, in its own virtual environment (``make test`` makes it)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.lib.standalone import Standalone
from tests.e2e.conftest import CLIENT_KEY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PYTHON = Path(sys.prefix) / "litellm/bin/python"
SCRIPT = Path(__file__).parent / "litellm_client.py"


@pytest.fixture(scope="module")
def seen(small_pool: Standalone) -> dict[str, Any]:
    """What the script saw."""
    assert PYTHON.exists(), f"{PYTHON} is missing: make test (or make .venv/installed-litellm)"
    ran = subprocess.run(
        [str(PYTHON), str(SCRIPT), small_pool.url, CLIENT_KEY],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # do not look for a newer one
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


def test_chats_whole_streamed_and_async(seen: dict[str, Any]) -> None:
    assert seen["whole"] == seen["streamed"] == seen["async"] != ""
    assert seen["usage"][0] == seen["usage"][1] > 0


def test_completions(seen: dict[str, Any]) -> None:
    assert seen["text"]


def test_tool_calls(seen: dict[str, Any]) -> None:
    assert seen["reason"] == "tool_calls"
    for call in [*seen["called"], *seen["rebuilt"]]:
        assert call["name"] == "weather" and set(json.loads(call["arguments"])) == {"city"}
    assert seen["called"] and len(seen["rebuilt"]) == 1


def test_a_json_schema(seen: dict[str, Any]) -> None:
    assert set(seen["typed"]) == {"name", "age"}  # validated by pydantic over there


def test_errors_are_the_clients_own(seen: dict[str, Any]) -> None:
    assert seen["errors"] == [
        ["BadRequestError", 400],
        ["AuthenticationError", 401],
        ["NotFoundError", 404],
        ["RateLimitError", 429],
    ]
