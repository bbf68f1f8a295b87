"""The peer of ``bench.router``: Dynamo's RadixTree and SelectionService in its own interpreter.

Each line on standard input names a step, and its result is one line of JSON. The process needs only
the package ai-dynamo-runtime and the standard library.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from dynamo.llm import RadixTree, SelectionService, compute_block_hash_for_seq

from bench.router.prompts import BLOCK_TOKENS, PIECE, WORKERS, PrefixWorkload

MODEL = "m"


def rss() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def chain(hashes: list[int]) -> list[int]:
    """Return the hash of each prefix, by which a worker names its blocks."""
    found, parent = [], 0
    for local in hashes:
        parent = hash((parent, local)) & 0x7FFF_FFFF_FFFF_FFFF
        found.append(parent)
    return found


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class DynamoPeer:
    """Runs the steps of the benchmark on Dynamo's index and service."""

    def __init__(self, blocks: int) -> None:
        self._workload = PrefixWorkload(blocks)
        self._tree = RadixTree()
        self._queries = [
            compute_block_hash_for_seq(list(tokens), BLOCK_TOKENS)
            for tokens in self._workload.queries()
        ]
        self._service: Any = None
        self._requests: list[dict[str, object]] = []

    def _events(self) -> list[tuple[int, bytes]]:
        local = [
            compute_block_hash_for_seq(list(self._workload.prompt(i)), BLOCK_TOKENS)
            for i in range(self._workload.prompts)
        ]
        chained = [chain(hashes) for hashes in local]
        events: list[tuple[int, bytes]] = []
        for prompt, worker, blocks in self._workload.held:
            names, hashes = chained[prompt], local[prompt]
            for start in range(0, blocks, PIECE):
                piece = range(start, min(start + PIECE, blocks))
                stored = {
                    "parent_hash": names[start - 1] if start else None,
                    "blocks": [{"block_hash": names[i], "tokens_hash": hashes[i]} for i in piece],
                }
                event = {"event_id": len(events) + 1, "dp_rank": 0, "data": {"stored": stored}}
                events.append((worker, json.dumps(event).encode()))
        return events

    def load(self) -> dict[str, float]:
        events = self._events()
        before, began = rss(), time.perf_counter()
        for worker, event in events:
            self._tree.apply_event(worker, event)
        self._tree.find_matches(self._queries[0])  # answers when all events have been applied
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "bytes": rss() - before}

    def ready(self) -> bool:
        return True

    def answers(self) -> list[dict[int, int]]:
        return [
            {worker: n for (worker, _), n in self._tree.find_matches(query).scores.items()}
            for query in self._queries
        ]

    def match(self) -> list[float]:
        times = []
        for query in self._queries:
            began = time.perf_counter()
            self._tree.find_matches(query)
            times.append(time.perf_counter() - began)
        return times

    async def service(self) -> bool:
        """Create a selection service that recovers the tree's contents from a dump."""
        events = [json.loads(event) for event in self._tree.dump_tree_as_events()]
        dump = {f"{MODEL}:default": {"block_size": BLOCK_TOKENS, "events": events}}
        self._service = SelectionService(indexer_threads=1)
        for worker in range(WORKERS):
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": MODEL,
                    "endpoint": f"http://127.0.0.1:{9000 + worker}",
                    "block_size": BLOCK_TOKENS,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 1_000_000,
                    "kv_events_endpoints": {0: f"tcp://127.0.0.1:{5900 + worker}"},
                }
            )
        with_dump = await asyncio.to_thread(serve, json.dumps(dump).encode())
        for hashes in self._queries:
            values = [signed(value) for value in hashes]
            request = {"model_name": MODEL, "isl_tokens": len(values) * BLOCK_TOKENS}
            self._requests.append(request | {"block_hashes": values, "sequence_hashes": values})
        return bool(await self._service.recover_indexer_from_peers([with_dump]))

    async def select(self) -> list[float]:
        times = []
        for request in self._requests:
            began = time.perf_counter()
            await self._service.select(request)
            times.append(time.perf_counter() - began)
        return times


def serve(dump: bytes) -> str:
    """Answer every GET with ``dump``; returns the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(dump)))
            self.end_headers()
            self.wfile.write(dump)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


async def main() -> None:
    peer = DynamoPeer(int(sys.argv[1]))
    steps = {step.__name__: step for step in (peer.ready, peer.load, peer.answers, peer.match)}
    later = {step.__name__: step for step in (peer.service, peer.select)}
    while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
        result = steps[name]() if name in steps else await later[name]()
        print("@" + json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
