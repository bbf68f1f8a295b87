"""The workload over HTTP, streamed, as a client sees it."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import msgspec

from bench.workload import Outcome, Timing, Workload, summarise


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, object] | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def _request(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], tokens: int
) -> Timing:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    timing = Timing()
    sent = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = _decode(line[6:])
            if chunk.error is not None:
                raise RuntimeError(f"the stream ended in an error: {chunk.error}")
            count = sum(len(choice.token_ids) for choice in chunk.choices)
            if count:
                timing.token(time.perf_counter() - sent, count)
    if timing.tokens != tokens:
        raise RuntimeError(f"{timing.tokens} tokens came, {tokens} were asked for")
    return timing


async def run_http(url: str, model: str, workload: Workload) -> Outcome:
    waiting = workload.prompts()
    timings: list[Timing] = []

    async def stream(session: aiohttp.ClientSession) -> None:
        while waiting:
            prompt = waiting.pop()
            timings.append(await _request(session, url, model, prompt, workload.output_tokens))

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        began = time.perf_counter()
        await asyncio.gather(*(stream(session) for _ in range(workload.streams)))
        return summarise(timings, time.perf_counter() - began)
