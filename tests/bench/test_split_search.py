"""The searches behind ``bench.pools`` begin each window with the state that the past left."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import cast

import pytest

from bench.pools import first_of
from bench.simulator.split_search import (
    PoolSplit,
    SplitTrial,
    allowed_misses,
    cache_prompts,
    parse_splits,
)
from bench.simulator.studies import MACHINES
from cluster.simulator.devices.cache import CACHE_BLOCK_TOKENS, SimulatedCache
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.scenario import parse_scenario
from router.placement.prefix_index import PrefixIndex


def _prompt(number: int, keys: list[int]) -> SimulatedRequest:
    blocks = tuple(key.to_bytes(8, "big") for key in keys)
    return SimulatedRequest(number, float(number), len(keys) * CACHE_BLOCK_TOKENS, 10, blocks)


def test_a_window_begins_with_the_answers_that_last_into_it(tmp_path: Path) -> None:
    """600 answers of 4,000 tokens, given up to 200 s before the window, fill one decode worker, of
    which each step of 256 sequences takes 61 ms and more."""
    trace = tmp_path / "trace.jsonl"
    long = [(1000 * n // 3, 4000) for n in range(600)]
    short = [(1000 * (200 + n), 100) for n in range(30)]
    trace.write_text(
        "\n".join(
            f'{{"timestamp": {at}, "input_length": 800, "output_length": {tokens}}}'
            for at, tokens in [*long, *short]
        )
    )
    scenario = parse_scenario(
        {
            "name": "window",
            "machines": MACHINES,
            "objectives": {"ttft_ms": 4000, "tpot_ms": 100},
            "traffic": {"trace": str(trace)},
        }
    )
    trial = SplitTrial(scenario, share=0.9)
    assert trial.attains(PoolSplit(1, 4), 200.0, math.inf)
    assert not trial.attains(PoolSplit(1, 1), 200.0, math.inf)


def test_prompts_shortly_before_a_window_are_computed(tmp_path: Path) -> None:
    """A prompt takes 3.1 s. In a minute 30 of them come, of which one worker computes 20."""
    trace = tmp_path / "trace.jsonl"
    times = [*range(0, 60, 2), 60, 70, 80]
    trace.write_text(
        "\n".join(
            f'{{"timestamp": {1000 * at}, "input_length": 10240, "output_length": 20,'
            f' "hash_ids": {[*range(1000 * at, 1000 * at + 20)]}}}'
            for at in times
        )
    )
    scenario = parse_scenario(
        {
            "machines": MACHINES,
            "objectives": {"ttft_ms": 4000, "tpot_ms": 100},
            "routing": {"admission_ttft_ms": 1e9},
            "traffic": {"trace": str(trace)},
        }
    )
    trial = SplitTrial(scenario)
    assert not trial.attains(PoolSplit(1, 1), 60.0, math.inf)
    assert trial.attains(PoolSplit(3, 1), 60.0, math.inf)


def test_prompts_are_cached_where_most_of_them_is() -> None:
    index = PrefixIndex()
    caches = [SimulatedCache(name, index, 8 * CACHE_BLOCK_TOKENS) for name in ("a", "b")]
    first, other, longer = _prompt(0, [1, 2]), _prompt(1, [8, 9]), _prompt(2, [1, 2, 3])
    cache_prompts(caches, 8 * CACHE_BLOCK_TOKENS, [first, other, longer])
    assert caches[0].cached_tokens(longer.blocks) == 3 * CACHE_BLOCK_TOKENS
    assert caches[1].cached_tokens(other.blocks) == 2 * CACHE_BLOCK_TOKENS
    assert caches[1].cached_tokens(longer.blocks) == 0


def test_only_the_latest_prompts_find_room() -> None:
    caches = [SimulatedCache("a", PrefixIndex(), 4 * CACHE_BLOCK_TOKENS)]
    old, new = _prompt(0, [1, 2]), _prompt(1, [7, 8, 9])
    cache_prompts(caches, 4 * CACHE_BLOCK_TOKENS, [old, new])
    assert caches[0].cached_tokens(old.blocks) == 0
    assert caches[0].cached_tokens(new.blocks) == 3 * CACHE_BLOCK_TOKENS


def test_windows_share_the_misses_that_more_workers_would_avoid() -> None:
    assert allowed_misses(0.9, [0, 10, 2], [100, 100, 200]) == [7, 17, 16]
    assert allowed_misses(0.9, [0, 45, 0], [100, 100, 200]) == [0, 45, 0]
    assert allowed_misses(0.99, [0, 0, 0], [50, 50, 50]) == [0, 1, 0]


class FixedTrial:
    """Pools of at least five workers attain."""

    def __init__(self) -> None:
        self.tried = list[PoolSplit]()

    def attains(self, split: PoolSplit) -> bool:
        self.tried.append(split)
        return split.total >= 5


def test_given_splits_are_tried_from_the_smallest_on() -> None:
    trial = FixedTrial()
    splits = parse_splits("9+1,2+2,3+2")
    assert first_of(cast("SplitTrial", trial), splits) == PoolSplit(3, 2)
    assert trial.tried == [PoolSplit(2, 2), PoolSplit(3, 2)]
    assert first_of(cast("SplitTrial", trial), parse_splits("2+2")) is None
    for text in ("", "3", "3+", "3+2,", "3P+2D"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected P"):
            parse_splits(text)
