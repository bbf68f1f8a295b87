from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.lib.routing_policies import least_loaded
from bench.lib.settings import router_settings
from protocol.registry.directory import ModelInfo, WorkerRecord
from router.http.app import create_app
from router.placement.choose import ChoosePlacement
from router.settings import RouterSettings
from tests.router.fake_worker import TOKEN, FakeWorker, Script, outputs

MODEL = "tiny"

CHAT_TEMPLATE = """\
{% if tools %}tools: {{ tools | map(attribute="function.name") | join(",") }} <tool_call>
{% endif %}
{% for message in messages %}
{{ message.role }}: {{ message.content }}{% if message.tool_calls %} \
{{ message.tool_calls[0].function.arguments | tojson }}{% endif %}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ voice | default("assistant") }}:{% endif %}"""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with a special token (id 0) and an added one that is plain text."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|eos|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(
        ["def hello(self): return 1\n", "The quick 🦊 über alles"] * 20, trainer
    )
    tok.add_tokens([AddedToken("new token é")])
    return tok


@pytest.fixture(scope="session")
def model_path(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_info(tokenizer: Tokenizer) -> ModelInfo:
    return ModelInfo(
        id=MODEL,
        fingerprint="f" * 32,
        precision="exact",
        max_model_len=4096,
        vocab_size=tokenizer.get_vocab_size(),
        kv_bytes_per_token=1024,
    )


@pytest.fixture
def settings(model_path: Path) -> RouterSettings:
    return router_settings(
        cluster="test",
        redis_url="redis://127.0.0.1:1/0",
        token=TOKEN,
        secret=b"secret",
        model_path=str(model_path),
        model_id=MODEL,
        refresh_s=0.05,
    )


@pytest.fixture(autouse=True)
def deterministic_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose equally loaded workers in the order of their names instead of at random."""
    monkeypatch.setattr("router.generation.placer.choose_placement", least_loaded)


class Cluster:
    """Fake workers, the directory that lists them, and a router over them in this process."""

    def __init__(self, settings: RouterSettings, model: ModelInfo) -> None:
        self.settings = settings
        self.model = model
        self.workers: list[FakeWorker] = []
        self.prefill: list[WorkerRecord] = []
        self.app: FastAPI
        self.client: httpx.AsyncClient

    async def list_workers(self) -> list[WorkerRecord]:
        return [w.record for w in self.workers if w.port] + self.prefill

    async def add(self, script: Script | None = None, **model: Any) -> FakeWorker:
        info = msgspec.structs.replace(self.model, **model)
        worker = FakeWorker(script or outputs(), info)
        await worker.start()
        self.workers.append(worker)
        return worker

    async def attached(self, count: int) -> None:
        await until(lambda: self.app.state.router.pool.attached == count)

    async def post(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, **body})

    async def chat(self, said: str = "hi", **body: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": said}], **body}
        return await self.client.post("/v1/chat/completions", json={"model": MODEL, **body})


@asynccontextmanager
async def running(
    settings: RouterSettings, model: ModelInfo, *scripts: Script
) -> AsyncIterator[Cluster]:
    cluster = Cluster(settings, model)
    for script in scripts:
        await cluster.add(script)
    cluster.app = create_app(settings, cluster.list_workers)
    transport = httpx.ASGITransport(cluster.app, raise_app_exceptions=False)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(cluster.app.router.lifespan_context(cluster.app))
        cluster.client = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://localhost")
        )
        await cluster.attached(len(scripts))
        yield cluster
    for worker in cluster.workers:
        await worker.stop()


Start = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def start(
    settings: RouterSettings, model_info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Start a cluster of fake workers, one for each script; keywords change the settings.

    ``choose`` replaces ``choose_placement`` of all routers in this process."""
    async with AsyncExitStack() as stack:

        async def run(
            *scripts: Script, choose: ChoosePlacement = least_loaded, **changes: Any
        ) -> Cluster:
            monkeypatch.setattr("router.generation.placer.choose_placement", choose)
            changed = msgspec.structs.replace(settings, **changes)
            return await stack.enter_async_context(running(changed, model_info, *scripts))

        yield run


@asynccontextmanager
async def served(app: FastAPI, port: int = 0) -> AsyncIterator[str]:
    """The app behind a real server; gives its URL. The lifespan must be running already."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        sock.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
