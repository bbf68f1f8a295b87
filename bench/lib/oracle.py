"""The expected text of seeded requests, and the streams of a pool that must have that text.

Benchmarks and tests that kill, drain or scale workers compare the two.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import torch

from bench.lib.engines import engine_config
from bench.lib.standalone import Standalone
from cluster.models.locate import demo_path
from engine.execution.engine import Engine
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.scheduling.step_policy import plan_prefill_step
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

STREAMS = 64
TOKENS = 64
EXACT = ("--kv-precision", "exact", "--kv-tokens", "32768", "--max-model-len", "4096")
"""Options of workers whose text must be identical to the oracle's."""

BUSY_ROUTER = ("--routing-policy", "least-loaded", "--admission-ttft-ms", "600000")
"""Options of a router that always uses the prefill workers and refuses no request."""


@dataclass
class StreamRecord:
    """One stream, as its client saw it. The test that sends the request creates it."""

    tokens: list[int] = field(default_factory=list)
    longest_wait_s: float = 0.0  # for the first token, or between two
    error: str = ""
    done: bool = False  # it ended with [DONE]


class Oracle:
    """Computes the text of the demo model with one engine in this process.

    Calling it with requests returns the token ids of each.
    """

    def __init__(self) -> None:
        folder = demo_path()
        config = load_config(folder)
        weights = load_weights(folder, config, torch.float32, torch.device("cpu"))
        self._model = DecoderModel(config, weights, 4096)

    def __call__(self, requests: Sequence[Request]) -> list[list[int]]:
        engine = Engine(
            self._model, engine_config(pages=1024, max_model_len=4096), plan_prefill_step
        )
        for handle, request in enumerate(requests):
            engine.generate(handle, request)
        texts: list[list[int]] = [[] for _ in requests]
        while step := engine.plan():
            for out in engine.run(step):
                texts[out.handle].append(out.token)
        return texts


def requests(seed: int, count: int = STREAMS, tokens: int = TOKENS) -> list[Request]:
    """Return requests whose prompts share no prefix; every other one is sampled."""
    draw = random.Random(seed)
    return [
        Request(
            id=f"{seed}.{i}",
            prompt=tuple(draw.randrange(3, 4096) for _ in range(draw.randrange(80, 160))),
            sampling=SamplingParams(
                temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=tokens, ignore_eos=True
            ),
            cache_root=bytes(16),
        )
        for i in range(count)
    ]


def body(request: Request, salt: str = "", *, stream: bool = True) -> dict[str, Any]:
    """Return the body of a completion; a new ``salt`` finds nothing in a prefix cache."""
    return {
        "model": "baton-demo",
        "prompt": list(request.prompt),
        "max_tokens": request.sampling.max_tokens,
        "temperature": request.sampling.temperature,
        "seed": request.sampling.seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
        "cache_salt": salt or "none",
    }


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    request: Request,
    salt: str = "",
    seen: StreamRecord | None = None,
) -> StreamRecord:
    seen = seen or StreamRecord()
    last = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body(request, salt)) as response:
        if response.status != 200:
            seen.error = f"{response.status} {await response.text()}"
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                seen.done = True
            elif line.startswith(b"data: "):
                chunk = msgspec.json.decode(line[6:])
                if "error" in chunk:
                    seen.error = str(chunk["error"])
                for choice in chunk.get("choices", ()):
                    seen.tokens += choice.get("token_ids") or []
                seen.longest_wait_s = max(seen.longest_wait_s, time.monotonic() - last)
                last = time.monotonic()
    return seen


async def streams(
    url: str,
    asked: Sequence[Request],
    salt: str = "",
    seen: Sequence[StreamRecord] | None = None,
    headers: Mapping[str, str] | None = None,
) -> list[StreamRecord]:
    """Send all requests at once; ``seen``, if given, is updated while the tokens come."""
    notes = seen or [StreamRecord() for _ in asked]
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout, headers=headers) as session:
        return await asyncio.gather(
            *(stream(session, url, r, salt, s) for r, s in zip(asked, notes, strict=True))
        )


async def kill(pool: Standalone, role: str, part: str, draw: random.Random) -> None:
    """Send SIGKILL to the front or the engine of a worker, a busy one if there is one."""
    serving = [r for r in await pool.records() if r.role == role and r.engine_pid]
    at_work = [r for r in serving if r.running or r.waiting]  # as of up to a second ago
    victim = draw.choice(at_work or serving)
    os.kill(victim.pid if part == "front" else victim.engine_pid, signal.SIGKILL)


def wrong(got: Sequence[StreamRecord], texts: Sequence[Sequence[int]]) -> list[str]:
    """Describe each stream that is incomplete or has another text than ``texts``."""
    return [
        f"stream {i}: {len(s.tokens)} tokens of {len(t)}, done={s.done}, {s.error or 'other text'}"
        for i, (s, t) in enumerate(zip(got, texts, strict=True))
        if not s.done or s.tokens != list(t)
    ]
