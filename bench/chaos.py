"""Streams through a pool whose processes are killed: what each stream got, and how long it waited.

``python -m bench.chaos --minutes N`` kills prefill and decode workers, fronts and engines, at
random moments, and compares every stream with the text of one undisturbed engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch

from bench.standalone import Standalone
from cluster.models import demo_path
from engine.checkpoint import load_config
from engine.core import Engine, EngineConfig
from engine.model import Model
from engine.weights import load_weights
from prefill_worker.policy import plan
from protocol.request import Request, Sampling

STREAMS = 64
TOKENS = 64
KINDS = [(role, part) for role in ("prefill", "decode") for part in ("front", "engine")]
EXACT = ("--kv-precision", "exact", "--kv-tokens", "32768", "--max-model-len", "4096")
"""Of workers whose text is to be identical."""

BUSY_ROUTER = ("--routing-policy", "least-loaded", "--admission-ttft-ms", "600000")
"""Of a router that gives work to prefill workers whatever it costs, and refuses none."""


@dataclass
class Seen:
    """One stream, as its client saw it."""

    tokens: list[int] = field(default_factory=list)
    longest_wait_s: float = 0.0  # for the first token, or between two
    error: str = ""
    done: bool = False  # it ended with [DONE]


class Oracle:
    """The text of the demo model on one engine in this process."""

    def __init__(self) -> None:
        folder = demo_path()
        config = load_config(folder)
        weights = load_weights(folder, config, torch.float32, torch.device("cpu"))
        self._model = Model(config, weights, 4096)

    def __call__(self, requests: Sequence[Request]) -> list[list[int]]:
        engine = Engine(self._model, EngineConfig(pages=1024, max_model_len=4096), plan)
        for handle, request in enumerate(requests):
            engine.generate(handle, request)
        texts: list[list[int]] = [[] for _ in requests]
        while step := engine.plan():
            for out in engine.run(step):
                texts[out.handle].append(out.token)
        return texts


def requests(seed: int, count: int = STREAMS, tokens: int = TOKENS) -> list[Request]:
    """Prompts that share nothing; every other one is sampled."""
    draw = random.Random(seed)
    return [
        Request(
            id=f"{seed}.{i}",
            prompt=tuple(draw.randrange(3, 4096) for _ in range(draw.randrange(80, 160))),
            sampling=Sampling(
                temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=tokens, ignore_eos=True
            ),
            cache_root=bytes(16),
        )
        for i in range(count)
    ]


def body(request: Request, salt: str = "", *, stream: bool = True) -> dict[str, Any]:
    """``salt``: with another one nothing of an earlier run is found in a prefix cache."""
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
    seen: Seen | None = None,
) -> Seen:
    seen = seen or Seen()
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
    url: str, asked: Sequence[Request], salt: str = "", seen: Sequence[Seen] | None = None
) -> list[Seen]:
    """All at once; ``seen``: where to note what comes."""
    notes = seen or [Seen() for _ in asked]
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as session:
        return await asyncio.gather(
            *(stream(session, url, r, salt, s) for r, s in zip(asked, notes, strict=True))
        )


async def kill(pool: Standalone, role: str, part: str, draw: random.Random) -> None:
    """-9 to the front or the engine of a worker."""
    serving = [r for r in await pool.records() if r.role == role and r.engine_pid]
    at_work = [r for r in serving if r.running or r.waiting]  # as of up to a second ago
    victim = draw.choice(at_work or serving)
    os.kill(victim.pid if part == "front" else victim.engine_pid, signal.SIGKILL)


async def disturbed(
    pool: Standalone, asked: Sequence[Request], kinds: Sequence[tuple[str, str]], seed: int
) -> list[Seen]:
    """The streams, while one process of each of ``kinds`` is killed at a random moment: when a
    random share of the tokens has come, so that there is work in it however fast the machine."""
    draw = random.Random(seed)
    seen = [Seen() for _ in asked]
    running = asyncio.create_task(streams(pool.url, asked, f"{seed}{kinds}", seen))
    total = sum(r.sampling.max_tokens for r in asked)
    shares = sorted(draw.uniform(0.0, 0.5) for _ in kinds)
    for share, (role, part) in zip(shares, sorted(kinds, reverse=True), strict=True):
        while sum(len(s.tokens) for s in seen) < share * total:
            await asyncio.sleep(0.01)
        await kill(pool, role, part, draw)
    return await running


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def wrong(got: Sequence[Seen], texts: Sequence[Sequence[int]]) -> list[str]:
    """What is amiss with each stream that did not get the text it should have."""
    return [
        f"stream {i}: {len(s.tokens)} tokens of {len(t)}, done={s.done}, {s.error or 'other text'}"
        for i, (s, t) in enumerate(zip(got, texts, strict=True))
        if not s.done or s.tokens != list(t)
    ]


async def soak(minutes: float, seed: int) -> int:
    """Rounds until the time is over; the number of streams that went wrong."""
    oracle, failed, total, waits = Oracle(), 0, 0, []
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:
        pool = Standalone(Path(folder), worker_options=EXACT, router_options=BUSY_ROUTER)
        try:
            await pool.start()
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                asked = requests(draw.randrange(1 << 30))
                kinds = draw.sample(KINDS, 2)  # a third death would rightly end a request
                got = await disturbed(pool, asked, kinds, draw.randrange(1 << 30))
                faults = wrong(got, oracle(asked))
                failed, total = failed + len(faults), total + len(got)
                waits += [s.longest_wait_s for s in got]
                p50, p99 = percentile(waits, 0.5), percentile(waits, 0.99)
                print(
                    f"{kinds}: {total} streams, {failed} wrong; wait {p50:.1f} s, {p99:.1f} s p99"
                )
                print(*faults, sep="\n", end="\n" if faults else "")
                await pool.whole()
        finally:
            await pool.close()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    raise SystemExit(bool(asyncio.run(soak(options.minutes, options.seed))))


if __name__ == "__main__":
    main()
