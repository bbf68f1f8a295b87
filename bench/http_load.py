"""The workload over HTTP, streamed, as a client sees it."""

from __future__ import annotations

import msgspec

from bench.report import median
from bench.serve.client import Clock, send, session
from bench.serve.dialect import Body, Dialect
from bench.serve.loop import Loop
from bench.serve.options import Options
from bench.serve.plan import Item, Piece
from bench.serve.records import Record
from bench.workload import Outcome, Workload

WORDS = Dialect(ids=True, token_ids=True, usage=False)


async def run_http(url: str, model: str, workload: Workload) -> Outcome:
    """Raises RuntimeError for a request that does not end as asked."""
    options = Options(url=url, model=model, concurrency=workload.streams, ignore_eos=True)
    body, prompts = Body(options, model, WORDS), workload.prompts()
    pieces, output = (Piece("own", workload.prompt_tokens),), workload.output_tokens
    clock = Clock()
    async with session(options) as http:

        async def one(item: Item, record: Record) -> None:
            encoded = body.json(msgspec.json.encode(prompts[item.number]), item.output)
            await send(http, f"{url}/v1/completions", encoded, record, clock)

        loop = Loop(one, clock)
        items = (Item(i, 0.0, pieces, output) for i in range(workload.requests))
        await loop.closed(items, workload.streams, None)
    return _outcome(loop.records, clock())


def _outcome(records: list[Record], wall_s: float) -> Outcome:
    for r in records:
        if not r.ok:
            raise RuntimeError(f"a request failed: {r.error}: {r.message}")
        if r.output != r.asked:
            raise RuntimeError(f"{r.output} tokens came, {r.asked} were asked for")
    return Outcome(
        median([r.ttft_from_sent or 0.0 for r in records]) * 1e3,
        median([r.tpot or 0.0 for r in records]) * 1e3,
        sum(r.output for r in records) / wall_s,
    )
