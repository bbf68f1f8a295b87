"""Workers and routers on a Redis by URL, with a password, behind TLS.

The password is in their environment; they print it nowhere, and `ps` does not show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from bench.lib.oracle import EXACT
from bench.lib.standalone import Standalone
from cluster.local.ports import free_ports
from tests.cluster.tls import PASSWORD, QUOTED, TcpRedis, certificate, tls_in_front
from tests.e2e.asking import Asker, cached, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Standalone]:
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a key")
    with contextlib.ExitStack() as stack:
        [port] = free_ports("127.0.0.1", 1)
        redis = TcpRedis(tmp_path, port)
        cert, key = certificate(tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))  # whom this machine trusts
        stack.enter_context(tls_in_front(redis.port, port, cert, key))
        pool = Standalone(tmp_path, ("prefill", "decode"), EXACT, routers=2, redis=redis)
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()


async def test_a_redis_with_a_password_behind_tls(pool: Standalone, tmp_path: Path) -> None:
    tokens = prompt(1, 200)
    async with aiohttp.ClientSession() as session:
        asker = Asker(pool, session, "any")
        assert cached(await asker.ask(tokens, 0)) == 0
        await asker.told(6)  # events and snapshots pass
        assert cached(await asker.ask(tokens, 1)) == 192
        pool.redis.stop()
        async with asyncio.timeout(10):  # what do they say of it?
            for text, count in (
                ("last list of workers", 2),
                ("lease is not renewed", 2),
            ):
                while pool.said(text) < count:
                    await asyncio.sleep(0.1)
        assert cached(await asker.ask(tokens, 0)) == 192
    lines = [" ".join(process.cmdline()) for process in pool.left()]
    assert len(lines) == 6  # two workers, their engines, two routers
    said = (tmp_path / "pool.log").read_text()
    assert "ready on" in said
    for shown in (*lines, said):
        assert PASSWORD not in shown and QUOTED not in shown


@pytest.mark.parametrize("command", [("worker", "--role", "decode"), ("router",), ("up",)])
def test_a_url_that_is_none_is_not_repeated(command: tuple[str, ...], tmp_path: Path) -> None:
    """As a password with a slash makes it."""
    ended = subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", *command],
        env={
            **os.environ,
            **{"BATON_TOKEN": "t", "BATON_SECRET": "ab" * 16, "BATON_HOME": str(tmp_path)},
            "BATON_REDIS_URL": f"redis://:{PASSWORD}@127.0.0.1:1/0",
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2
    assert "environment BATON_REDIS_URL: redis.url: got a hidden value; expected redis://" in said
    assert PASSWORD.partition("/")[0] not in said and "Traceback" not in said
