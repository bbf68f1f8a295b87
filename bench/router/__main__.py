"""The router's decision: 64 workers, prompts of 2,000 blocks, a million blocks in the index.

    python -m bench.router [--blocks N] [--dynamo-python PATH]

PATH is the interpreter of a virtual environment with ``ai-dynamo-runtime==1.6.1``. With it, its
``RadixTree.find_matches`` and ``SelectionService.select`` answer the same prompts in a process of
its own, in rounds that take turns with ours; that both matches are equal is checked first. Each is
timed as Python calls it, from block hashes to the answer; hashing is left out on both sides. p50
and p99 are those of the median round.

"ingestion" is from an event as it comes from outside (ours: packed, as in Redis; Dynamo's: JSON) to
the index. Bytes are ours by the index's own estimate, or by how much the process grew meanwhile,
whichever is more; the peer's by how much it grew.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.lib.report import ResultRow, finish, median, percentile
from bench.router.prompts import BLOCK_TOKENS, PIECE, PROMPT_BLOCKS, WORKERS, PrefixWorkload
from protocol.block_keys import block_keys, cache_root
from protocol.kv_events import (
    FIELD,
    CacheChange,
    CacheChangeKind,
    encode_entries,
    encode_snapshot,
    split_keys,
)
from protocol.registry.directory import ModelInfo, WorkerRecord
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb
from router.generation.placer import Placer
from router.http.state import WorkerTracker
from router.placement.estimates import RoutingEstimates
from router.placement.event_cursor import EventCursor
from router.placement.ledger import QueuedPrompts, WorkLedger
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import Objectives
from router.workers.decode_link import DecodeLink
from router.workers.pool import WorkerPool

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


class RouterChoices:
    """The state of a router with WORKERS workers whose blocks are in ``index``."""

    def __init__(self, index: PrefixIndex) -> None:
        rng = random.Random(0)
        ledger, learned = WorkLedger(time.monotonic), RoutingEstimates()
        watch = WorkerTracker(index, ledger, learned, None)
        pool = WorkerPool(_nobody, model_id="m", token="", refresh_s=1.0, listener=watch)
        records = [record(number, rng) for number in range(WORKERS)]
        pool.prefill = {r.instance: r for r in records if r.role == "prefill"}
        for r in records:
            if r.role == "decode":
                pool.links[r.instance] = _attached(r, rng)
        pool.apply_records()
        for r in pool.prefill.values():
            watch.on_load(r.instance, QueuedPrompts.of(r), 0)
        self._placer = Placer(pool, index, ledger, learned, Objectives(2.0, 0.1))

    def choose(self, queries: Sequence[Sequence[bytes]]) -> list[float]:
        """Return the seconds of each decision; ``queries`` has the block keys of each prompt."""
        times = []
        for keys in queries:
            prompt = (0,) * (len(keys) * BLOCK_TOKENS)
            request = Request(id="r", prompt=prompt, sampling=SamplingParams(max_tokens=256))
            began = time.perf_counter()
            placed = self._placer.place(request, keys)
            times.append(time.perf_counter() - began)
            assert placed is not None
        return times


def _attached(record: WorkerRecord, rng: random.Random) -> DecodeLink:
    """Make a link that is marked attached and has a random load; nothing is sent on it."""
    link = DecodeLink(record, "", lambda: None)
    free = rng.randrange(300_000, 1_000_000)
    link.attached = True
    link.report(pb.Load(running=rng.randrange(100), kv_tokens_free=free, kv_tokens_total=1_000_000))
    return link


async def _nobody() -> list[WorkerRecord]:
    return []


ROUNDS = 15
ROOT = cache_root(b"bench", "tenant", "fingerprint", "exact")


class BatonIndex:
    """Baton's prefix index, filled with the events of the workers of a workload."""

    def __init__(self, workload: PrefixWorkload) -> None:
        self.index = PrefixIndex()
        self._queries = [b"".join(block_keys(ROOT, tokens)) for tokens in workload.queries()]
        self._workload = workload

    def load(self) -> tuple[float, int, int]:
        """Return the seconds, the bytes and the number of (worker, block) pairs reported."""
        entries, pairs = self._entries()
        cursors = [EventCursor(self.index, str(worker)) for worker in range(WORKERS)]
        for cursor in cursors:
            for _ in cursor.apply_snapshot(encode_snapshot(cursor.instance, 1, [])):
                pass
        process = psutil.Process()
        before, began = process.memory_info().rss, time.perf_counter()
        for worker, entry_id, entry in entries:
            for _ in cursors[worker].apply_entry(entry_id, {FIELD: entry}):
                pass
        seconds = time.perf_counter() - began
        return seconds, process.memory_info().rss - before, pairs

    def _entries(self) -> tuple[list[tuple[int, bytes, bytes]], int]:
        workload = self._workload
        keys = [block_keys(ROOT, workload.prompt(i)) for i in range(workload.prompts)]
        seq = [1] * WORKERS
        entries = []
        for prompt, worker, blocks in workload.held:
            for start in range(0, blocks, PIECE):
                piece = keys[prompt][start : min(start + PIECE, blocks)]
                seq[worker] += 1
                [entry] = encode_entries([CacheChange(CacheChangeKind.STORED, b"".join(piece))])
                entries.append((worker, b"%d-0" % seq[worker], entry))
        return entries, sum(held.blocks for held in workload.held)

    def answers(self) -> list[dict[str, int]]:
        return [self.index.match(split_keys(query)) for query in self._queries]

    def keys(self) -> list[list[bytes]]:
        """Return the block keys of each query as new objects, as those of a request are."""
        return [split_keys(query) for query in self._queries]

    def match(self) -> list[float]:
        """Return the seconds of each match, with keys that are new objects."""
        times = []
        for query in self._queries:
            keys = split_keys(query)
            began = time.perf_counter()
            self.index.match(keys)
            times.append(time.perf_counter() - began)
        return times


class DynamoProcess:
    """The process that runs ``bench/router/dynamo.py``."""

    def __init__(self, python: Path, blocks: int) -> None:
        here = Path(__file__).parent
        self._process = subprocess.Popen(
            [python, here / "dynamo.py", str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(here.parents[1]), "DYN_LOG": "error"},
            text=True,
        )
        self("ready")

    def __call__(self, step: str) -> Any:
        """Run one step in the process. Raises RuntimeError if the process ends instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(step + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                return msgspec.json.decode(line[1:])
        raise RuntimeError(f"the peer ended at {step!r}, status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


Rounds = list[list[float]]  # seconds of each query


def times_rows(name: str, ours: Rounds, peer: Rounds, peer_name: str) -> list[ResultRow]:
    """Make rows of p50 and p99 in microseconds; ratios are the peer's time over ours."""
    rows = []
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        value, other = (
            1e6 * median([percentile(times, share) for times in rounds] or [0.0])
            for rounds in (ours, peer)
        )
        against = f"{peer_name} {other:.1f}" if peer else ""
        rows.append(
            ResultRow(f"{name} {label}", value, "us", against, other / value if peer else None)
        )
    return rows


def load_rows(ours: BatonIndex, peer: DynamoProcess | None) -> list[ResultRow]:
    seconds, grown, pairs = ours.load()
    entries = ours.index.entries
    rate, size = pairs / seconds, max(grown, ours.index.memory_bytes) / entries
    rows = [ResultRow("distinct blocks in the index", entries, "")]
    if peer is None:
        return [
            *rows,
            ResultRow("ingestion", rate, "blocks/s"),
            ResultRow("index", size, "bytes/block"),
        ]
    theirs = peer("load")
    other_rate, other_size = pairs / theirs["seconds"], theirs["bytes"] / entries
    return [
        *rows,
        ResultRow("ingestion", rate, "blocks/s", f"RadixTree {other_rate:.4g}", rate / other_rate),
        ResultRow("index", size, "bytes/block", f"RadixTree {other_size:.1f}", other_size / size),
    ]


def check_same(ours: BatonIndex, peer: DynamoProcess) -> None:
    theirs = [{str(w): n for w, n in answer.items()} for answer in peer("answers")]
    for number, (mine, other) in enumerate(zip(ours.answers(), theirs, strict=True)):
        if mine != other:
            raise RuntimeError(f"query {number}: ours {mine}, the peer's {other}")


def match_rows(ours: BatonIndex, peer: DynamoProcess | None) -> list[ResultRow]:
    if peer is not None:
        check_same(ours, peer)
    mine: Rounds = []
    theirs: Rounds = []
    for _ in range(ROUNDS):
        mine.append(ours.match())
        if peer is not None:
            theirs.append(peer("match"))
    return times_rows(f"match {PROMPT_BLOCKS} blocks", mine, theirs, "RadixTree")


def choice_rows(ours: BatonIndex, peer: DynamoProcess | None) -> list[ResultRow]:
    """Time the whole choice: match, loads, cost of the candidates and decision."""
    served = peer is not None and peer("service")
    choices = RouterChoices(ours.index)
    mine: Rounds = []
    theirs: Rounds = []
    for _ in range(ROUNDS):
        mine.append(choices.choose(ours.keys()))
        if peer is not None and served:
            theirs.append(peer("select"))
    return times_rows("full choice", mine, theirs, "SelectionService.select")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--dynamo-python", type=Path)
    options = parser.parse_args()
    peer = None
    if options.dynamo_python is None:
        print("no --dynamo-python: ours alone")
    else:
        peer = DynamoProcess(options.dynamo_python, options.blocks)
    try:
        ours = BatonIndex(PrefixWorkload(options.blocks))
        rows = [*load_rows(ours, peer), *match_rows(ours, peer), *choice_rows(ours, peer)]
    finally:
        if peer is not None:
            peer.close()
    finish("router", rows)


if __name__ == "__main__":
    main()
