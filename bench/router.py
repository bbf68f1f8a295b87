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
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.report import Row, finish, median, percentile
from bench.router_choice import Choices
from bench.router_prompts import PIECE, PROMPT_BLOCKS, WORKERS, Workload
from protocol.blocks import block_keys, cache_root
from protocol.events import FIELD, Change, Kind, encode_entries, encode_snapshot, split_keys
from router.cursor import Cursor
from router.index import PrefixIndex

ROUNDS = 15
ROOT = cache_root(b"bench", "tenant", "fingerprint", "exact")


class Ours:
    """Our index, fed with what the workers of a workload report."""

    def __init__(self, workload: Workload) -> None:
        self.index = PrefixIndex()
        self._queries = [b"".join(block_keys(ROOT, tokens)) for tokens in workload.queries()]
        self._workload = workload

    def load(self) -> tuple[float, int, int]:
        """Seconds, bytes, and (worker, block) pairs reported."""
        entries, pairs = self._entries()
        cursors = [Cursor(self.index, str(worker)) for worker in range(WORKERS)]
        for cursor in cursors:
            for _ in cursor.snapshot(encode_snapshot(cursor.instance, 1, [])):
                pass
        process = psutil.Process()
        before, began = process.memory_info().rss, time.perf_counter()
        for worker, entry_id, entry in entries:
            for _ in cursors[worker].entry(entry_id, {FIELD: entry}):
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
                [entry] = encode_entries([Change(Kind.STORED, b"".join(piece))])
                entries.append((worker, b"%d-0" % seq[worker], entry))
        return entries, sum(held.blocks for held in workload.held)

    def answers(self) -> list[dict[str, int]]:
        return [self.index.match(split_keys(query)) for query in self._queries]

    def keys(self) -> list[list[bytes]]:
        """Of each query; new objects, as a request's are."""
        return [split_keys(query) for query in self._queries]

    def match(self) -> list[float]:
        """Seconds of each query. Its keys are new objects, as a request's are."""
        times = []
        for query in self._queries:
            keys = split_keys(query)
            began = time.perf_counter()
            self.index.match(keys)
            times.append(time.perf_counter() - began)
        return times


class Peer:
    """The process that runs ``bench/router_dynamo.py``."""

    def __init__(self, python: Path, blocks: int) -> None:
        here = Path(__file__).parent
        self._process = subprocess.Popen(
            [python, here / "router_dynamo.py", str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(here.parent), "DYN_LOG": "error"},
            text=True,
        )
        self("ready")

    def __call__(self, step: str) -> Any:
        """What the peer answers to a step. Raises RuntimeError when it ends instead."""
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


def times_rows(name: str, ours: Rounds, peer: Rounds, peer_name: str) -> list[Row]:
    """p50 and p99 in microseconds; the ratio is how much longer the peer takes."""
    rows = []
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        value, other = (
            1e6 * median([percentile(times, share) for times in rounds] or [0.0])
            for rounds in (ours, peer)
        )
        against = f"{peer_name} {other:.1f}" if peer else ""
        rows.append(Row(f"{name} {label}", value, "us", against, other / value if peer else None))
    return rows


def load_rows(ours: Ours, peer: Peer | None) -> list[Row]:
    seconds, grown, pairs = ours.load()
    entries = ours.index.entries
    rate, size = pairs / seconds, max(grown, ours.index.memory_bytes) / entries
    rows = [Row("distinct blocks in the index", entries, "")]
    if peer is None:
        return [*rows, Row("ingestion", rate, "blocks/s"), Row("index", size, "bytes/block")]
    theirs = peer("load")
    other_rate, other_size = pairs / theirs["seconds"], theirs["bytes"] / entries
    return [
        *rows,
        Row("ingestion", rate, "blocks/s", f"RadixTree {other_rate:.4g}", rate / other_rate),
        Row("index", size, "bytes/block", f"RadixTree {other_size:.1f}", other_size / size),
    ]


def check_same(ours: Ours, peer: Peer) -> None:
    theirs = [{str(w): n for w, n in answer.items()} for answer in peer("answers")]
    for number, (mine, other) in enumerate(zip(ours.answers(), theirs, strict=True)):
        if mine != other:
            raise RuntimeError(f"query {number}: ours {mine}, the peer's {other}")


def match_rows(ours: Ours, peer: Peer | None) -> list[Row]:
    if peer is not None:
        check_same(ours, peer)
    mine: Rounds = []
    theirs: Rounds = []
    for _ in range(ROUNDS):
        mine.append(ours.match())
        if peer is not None:
            theirs.append(peer("match"))
    return times_rows(f"match {PROMPT_BLOCKS} blocks", mine, theirs, "RadixTree")


def choice_rows(ours: Ours, peer: Peer | None) -> list[Row]:
    """Match, loads, cost of the candidates, choice."""
    served = peer is not None and peer("service")
    choices = Choices(ours.index)
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
        peer = Peer(options.dynamo_python, options.blocks)
    try:
        ours = Ours(Workload(options.blocks))
        rows = [*load_rows(ours, peer), *match_rows(ours, peer), *choice_rows(ours, peer)]
    finally:
        if peer is not None:
            peer.close()
    finish("router", rows)


if __name__ == "__main__":
    main()
