"""The whole decision of the router in ``bench.router``: half of the workers prefill, half decode.

Loads are drawn at random; nothing is sent. What is timed is what a request waits for: the match,
the snapshot of all workers, the cost of the candidates, the choice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from bench.router_prompts import BLOCK_TOKENS, WORKERS
from protocol import wire_pb2 as pb
from protocol.directory import ModelInfo, WorkerRecord
from protocol.request import Request, Sampling
from router.index import PrefixIndex
from router.learned import Learned
from router.ledger import Ledger
from router.link import DecodeLink
from router.placing import Placer
from router.snapshot import Objectives
from router.watch import Watch
from router.workers import Pool

MODEL = ModelInfo(
    id="m",
    fingerprint="f",
    precision="fp8",
    max_model_len=1 << 20,
    vocab_size=1 << 16,
    kv_bytes_per_token=64 * 1024,
)
STEP = (0.008, 1e-4, 2e-8, 3e-5, 1e-10)


def record(number: int, rng: random.Random) -> WorkerRecord:
    return WorkerRecord(
        instance=str(number),
        role="decode" if number % 2 else "prefill",
        endpoint=f"127.0.0.1:{9000 + number}",
        kv_endpoint=f"127.0.0.1:{19000 + number}",
        model=MODEL,
        pid=1,
        engine_pid=2,
        queued_tokens=0 if number % 2 else rng.randrange(200_000),
        step_model=STEP,
        max_batch=128,
        prefill_chunk=2048,
    )


class Choices:
    """A router's books over WORKERS workers whose blocks are in ``index``."""

    def __init__(self, index: PrefixIndex) -> None:
        rng = random.Random(0)
        ledger, learned = Ledger(time.monotonic), Learned()
        watch = Watch(index, ledger, learned, None)
        pool = Pool(_nobody, model_id="m", token="", refresh_s=1.0, watcher=watch)
        records = [record(number, rng) for number in range(WORKERS)]
        pool.prefill = {r.instance: r for r in records if r.role == "prefill"}
        for r in records:
            if r.role == "decode":
                pool.links[r.instance] = _attached(r, rng)
        pool.told()
        self._placer = Placer(pool, index, ledger, learned, Objectives(2.0, 0.1), "cost")

    def choose(self, queries: Sequence[Sequence[bytes]]) -> list[float]:
        """Seconds of each decision; ``queries``: the block keys of each prompt."""
        times = []
        for keys in queries:
            prompt = (0,) * (len(keys) * BLOCK_TOKENS)
            request = Request(id="r", prompt=prompt, sampling=Sampling(max_tokens=256))
            began = time.perf_counter()
            placed = self._placer.place(request, keys)
            times.append(time.perf_counter() - began)
            assert placed is not None
        return times


def _attached(record: WorkerRecord, rng: random.Random) -> DecodeLink:
    """A link that says it is up, with a load; nothing is sent on it."""
    link = DecodeLink(record, "", lambda: None)
    free = rng.randrange(300_000, 1_000_000)
    link.attached = True
    link.report(pb.Load(running=rng.randrange(100), kv_tokens_free=free, kv_tokens_total=1_000_000))
    return link


async def _nobody() -> list[WorkerRecord]:
    return []
