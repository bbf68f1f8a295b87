"""Schemathesis against the server's own document: what it says is what happens.

One check is left out where the whole document is tried: that all bodies that fit it are accepted.
Token ids beyond the vocabulary, grammars that are none, and fields that want each other fit it,
too. How many are accepted is checked apart. What the time allows is tried.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import Cluster, Start
from tests.router.fake_worker import outputs
from tests.router.raw_http import guarded_server

pytestmark = pytest.mark.timeout(300)

CONFIG = f"""\
hooks = "{Path(__file__).with_name("schemathesis_hooks.py")}"

[checks.negative_data_rejection]
expected-statuses = [400, 404, 405, 413, 414, 415, 429, 431]

[checks.not_a_server_error]
expected-statuses = [200, 204, 307, 400, 401, 403, 404, 405, 408, 413, 414, 415, 429, 431, 499, 529]
"""
_ENDED = re.compile(r'^baton_requests_total{.*status="(\w+)"} (\S+)$', re.MULTILINE)


async def schemathesis(cluster: Cluster, folder: Path, *options: str) -> str:
    """What it printed; fails where it found something."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    async with guarded_server(cluster) as port:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"),
            f"http://127.0.0.1:{port}/openapi.json",
            *("--checks", "all", "--seed", "1"),
            *("--generation-database", "none", "--suppress-health-check", "all", "--no-shrink"),
            *("--continue-on-failure", "--warnings", "off", *options),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            printed = (await process.communicate())[0].decode(errors="replace")
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, printed[-8000:]
    return printed


async def brief(request: pb.Request) -> AsyncIterator[pb.Output]:
    """A script: two tokens, and whatever is to be told of them."""
    request.sampling.max_tokens = min(request.sampling.max_tokens, 2)
    async for output in outputs(together=2)(request):
        yield output


async def test_the_document_holds(start: Start, tmp_path: Path) -> None:
    cluster = await start(brief)
    printed = await schemathesis(
        cluster,
        tmp_path,
        *("--exclude-checks", "positive_data_acceptance"),
        *("--phases", "coverage", "--max-time", "150"),
    )
    generated = re.search(r"(\d+) generated", printed)
    assert generated is not None and int(generated[1]) > 200, printed[-2000:]


async def test_most_bodies_that_fit_it_are_accepted(start: Start, tmp_path: Path) -> None:
    cluster = await start(brief)
    await schemathesis(
        cluster,
        tmp_path,
        *("--exclude-checks", "positive_data_acceptance,unsupported_method"),
        *("--phases", "fuzzing", "--mode", "positive", "--include-method", "POST"),
        *("--max-examples", "40"),
    )
    page = cluster.app.state.router.metrics_page().decode()
    ended = {status: float(count) for status, count in _ENDED.findall(page) if float(count)}
    # 429, 529: it asked for the first token too soon.
    assert set(ended) <= {"ok", "400", "429", "529"}, ended
    assert ended["ok"] > 40 and ended["ok"] > 2 * ended.get("400", 0), ended
