"""Known secrets go in, and come out nowhere: not in what processes print, not in their command
lines, errors or metrics."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from bench.lib.settings import router_settings, worker_settings
from bench.lib.standalone import Standalone
from protocol.security import cluster_token
from protocol.wire import wire_pb2_grpc as rpc
from tests.cluster.tls import PASSWORD, QUOTED, TcpRedis

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

KEY, WRONG = "sk-known-only-to-acme", "sk-wrong-but-still-somebodys"
TOKEN, SECRET = "tok" * 12, "5ec2e7" * 8
SECRETS = (KEY, WRONG, TOKEN, SECRET, PASSWORD, QUOTED)


async def test_nothing_of_a_pool_shows_a_secret(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{KEY}: {{tenant: acme, scopes: [admin]}}\n")
    keys.chmod(0o600)
    pool = Standalone(
        tmp_path,
        ("prefill", "decode"),
        router_options=("--api-keys", str(keys)),
        redis=TcpRedis(tmp_path),
    )
    pool._env |= {"BATON_TOKEN": TOKEN, "BATON_SECRET": SECRET}
    try:
        await pool.start()
        shown = await _asked(pool)
        shown += _command_lines(pool)
        pool.redis.stop()  # everybody has something to say about that
        await asyncio.sleep(3.0)
        shown += (tmp_path / "pool.log").read_text(errors="replace")
    finally:
        await pool.close()
    assert "Redis does not answer" in shown and "baton_requests_total" in shown
    for secret in SECRETS:
        assert secret not in shown


async def _asked(pool: Standalone) -> str:
    """Good and bad requests at every door, and what came back."""
    body = {"model": "baton-demo", "prompt": "x" * 900, "max_tokens": 2}
    answers = []
    async with httpx.AsyncClient(base_url=pool.url, timeout=30) as client:
        for key, status in ((KEY, 200), (WRONG, 401)):
            headers = {"authorization": f"Bearer {key}"}
            answers.append(await client.post("/v1/completions", json=body, headers=headers))
            assert answers[-1].status_code == status, answers[-1].text
        bad = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        answers.append(await client.post("/v1/completions", content=b"{", headers=bad))
        found = await client.get("/sd", headers=bad)
        pages = [f"http://{group['targets'][0]}/metrics" for group in found.json()]
        answers += [await client.get(page) for page in pages]
        assert len(answers) == 3 + 3
        answers += [found, await client.get("/metrics", headers=bad)]
    details = [await _refused(record.endpoint) for record in await pool.records()]
    assert len(details) == 2
    return "".join([*(a.text + str(a.headers) for a in answers), *details])


async def _refused(endpoint: str) -> str:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        call = rpc.PrefillStub(channel).Run(
            metadata=cluster_token.token_metadata("nearly the token"), timeout=5
        )
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        return str(await call.details())


def _command_lines(pool: Standalone) -> str:
    found = [psutil.Process(p.pid) for p in (*pool.workers, *pool.routers)]
    found += [child for p in found for child in p.children(recursive=True)]
    assert len(found) >= 5  # with the engines
    return "\n".join(" ".join(process.cmdline()) for process in found)


def test_settings_do_not_show_theirs() -> None:
    url = f"redis://:{QUOTED}@127.0.0.1:1/0"
    common = {"cluster": "c", "redis_url": url, "token": TOKEN, "model_path": "/m", "model_id": "m"}
    worker = worker_settings("decode", **common)
    router = router_settings(secret=SECRET.encode(), **common)
    for settings in (worker, router):
        for text in (repr(settings), str(settings), f"{settings}"):
            assert not any(secret in text for secret in SECRETS)


@pytest.mark.parametrize(
    "changes",
    [
        {"BATON_SECRET": SECRET[:-1]},
        {"BATON_REDIS_URL": f"redis://:{PASSWORD}@127.0.0.1:1/0"},  # it has a / in it
        {"BATON_REDIS_URL": f"redis://:{QUOTED}@127.0.0.1:1/{SECRET}"},
        {"BATON_REDIS_URL": f"redis://10.0.0.5:1/0?username={SECRET}"},
    ],
)
def test_mistakes_in_secrets_are_named_and_not_repeated(changes: dict[str, str]) -> None:
    good = {
        "BATON_TOKEN": TOKEN,
        "BATON_SECRET": SECRET,
        "BATON_REDIS_URL": f"redis://:{QUOTED}@127.0.0.1:1/0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", "router", "--port", "1"],
        env=os.environ | good | changes,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0 and said
    assert not any(secret in said for secret in (*SECRETS, SECRET[:-1]))
