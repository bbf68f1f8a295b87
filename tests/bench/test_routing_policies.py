"""A small trace in Mooncake's format: what scaling and sampling keep of it."""

from __future__ import annotations

import json
from pathlib import Path

from bench.routing_policies import CONTEXT, LEAST_OUTPUT, SCALE, sample, scaled
from cluster.workloads.traces import TraceRequest, read_trace
from protocol.block_keys import BLOCK_TOKENS

LINES = [
    {"timestamp": 0, "input_length": 1300, "output_length": 160, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 900, "output_length": 3, "hash_ids": [0, 7]},
    {"timestamp": 9000, "input_length": 2000, "output_length": 320, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 12000, "input_length": 80_000, "output_length": 16, "hash_ids": list(range(157))},
]


def trace(folder: Path) -> list[TraceRequest]:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES))
    return read_trace(path)


def test_scaling_keeps_lengths_times_and_shared_prefixes(tmp_path: Path) -> None:
    first, other, next_turn, long = scaled(trace(tmp_path), 4.0)
    assert [a.at for a in (first, other, next_turn, long)] == [0.0, 1.0, 3.0, 4.0]
    assert len(first.prompt) == 1300 // SCALE and first.output == 160 // SCALE
    assert other.output == LEAST_OUTPUT
    assert first.prompt[: 2 * BLOCK_TOKENS] == next_turn.prompt[: 2 * BLOCK_TOKENS]
    assert first.prompt[2 * BLOCK_TOKENS] != next_turn.prompt[2 * BLOCK_TOKENS]
    assert first.prompt[:BLOCK_TOKENS] == other.prompt[:BLOCK_TOKENS]
    assert first.prompt[BLOCK_TOKENS] != other.prompt[BLOCK_TOKENS]
    assert len(long.prompt) + long.output == CONTEXT


def test_conversations_are_sampled_whole_and_in_order(tmp_path: Path) -> None:
    whole = trace(tmp_path)
    for seed in range(8):
        chosen = sample(whole, 3, seed)
        turns = [r for r in chosen if r.blocks[1] == 1]
        assert len(turns) in (0, 3)
        assert [r.at for r in chosen] == sorted(r.at for r in chosen)
    assert sample(whole, 4, 1) == whole
    assert sample(whole, 4, 1) == sample(whole, 4, 1)
