"""A router over a worker that follows a script: the model behind an agent client.

    client --HTTP--> recorder --> router --gRPC--> fake worker: a function of the prompt

The worker reads its prompt as text. A prompt with tools is a turn of the task: the number of tool
results in it picks the step of the script. A prompt without tools is a side request of the client
(for a title, say) and is answered in two words.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.lib.settings import router_settings
from protocol.registry.directory import ModelInfo
from protocol.wire import wire_pb2 as pb
from tests.router.anthropic.agent_templates import MODELS, Written
from tests.router.anthropic.sessions import common_prefix
from tests.router.conftest import running, served
from tests.router.fake_worker import TOKEN, Script, speaks
from tests.router.openai.chat.toy import byte_level, save

MODEL = "scripted"
WINDOW = 1_000_000
"""Agents begin with some 100 kB of instructions and tools, and a token is about a byte here."""

RESULT = "<tool_response>"


@dataclass
class Turn:
    """One request as the worker has seen it, and what it has answered."""

    prompt: list[int]
    output: list[int]


@dataclass
class Exchange:
    """One HTTP request of the client."""

    method: str
    path: str
    status: int = 0


@dataclass
class ScriptedRouter:
    """A running router; ``turns`` are those of the task, ``side`` the client's other requests."""

    url: str = ""
    turns: list[Turn] = field(default_factory=list)
    side: list[Turn] = field(default_factory=list)
    text: Callable[[list[int]], str] = str
    exchanges: list[Exchange] = field(default_factory=list)

    def kept(self) -> list[tuple[int, int]]:
        """For each turn but the first, the tokens of the last prompt and output, and how many of
        them the turn's prompt begins with."""
        found = []
        for last, turn in itertools.pairwise(self.turns):
            past = last.prompt + last.output
            found.append((len(past), common_prefix(past, turn.prompt)))
        return found


def _script(router: ScriptedRouter, tokenizer: Tokenizer, steps: Sequence[Written]) -> Script:
    end = tokenizer.token_to_id("<|im_end|>")
    write = MODELS["qwen3"].write

    async def script(request: pb.Request) -> AsyncIterator[pb.Output]:
        prompt = list(request.prompt)
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        head, _, _ = text.partition("<|im_end|>")
        on_task = "# Tools\n" in head
        done = text.count(RESULT) - head.count(RESULT)
        step = steps[min(done, len(steps) - 1)] if on_task else Written("", "All right.", [])
        ids = tokenizer.encode(write(step), add_special_tokens=False).ids
        assert ids[-1] == end
        (router.turns if on_task else router.side).append(Turn(prompt, ids))
        async for output in speaks(ids, together=5)(request):
            yield output

    return script


class _Recorder:
    """ASGI middleware: keeps every exchange."""

    def __init__(self, app: Any, into: list[Exchange]) -> None:
        self._app, self._into = app, into

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope["method"], scope["path"])
        self._into.append(exchange)

        async def send_and_keep(message: Any) -> None:
            exchange.status = message.get("status", exchange.status)
            await send(message)

        await self._app(scope, receive, send_and_keep)


@asynccontextmanager
async def scripted_router(folder: Path, steps: Sequence[Written]) -> AsyncIterator[ScriptedRouter]:
    """Serve a model in the style of Qwen 3 that takes ``steps``, one after each tool result."""
    tokenizer = byte_level()
    save(folder, tokenizer, MODELS["qwen3"].template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["eos_token"] = "<|im_end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = ModelInfo(
        id=MODEL,
        fingerprint="f" * 32,
        precision="exact",
        max_model_len=WINDOW,
        vocab_size=tokenizer.get_vocab_size(),
        kv_bytes_per_token=1024,
    )
    settings = router_settings(
        cluster="test",
        redis_url="redis://127.0.0.1:1/0",
        token=TOKEN,
        secret=b"secret",
        model_path=str(folder),
        model_id=MODEL,
        refresh_s=0.05,
    )
    router = ScriptedRouter(text=tokenizer.decode)
    async with running(settings, model, _script(router, tokenizer, steps)) as cluster:
        cluster.workers[0].load = pb.Load(kv_tokens_free=WINDOW, kv_tokens_total=WINDOW)
        async with served(_Recorder(cluster.app, router.exchanges)) as router.url:  # type: ignore[arg-type]
            yield router
