"""Arrival processes, request lengths and public traces."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean, pstdev

import pytest

from cluster.workloads.distributions import ArrivalKind, ConstantLength, draw_gap, parse_length
from cluster.workloads.traces import read_trace
from protocol.errors import StartupError

MOONCAKE = """\
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 3]}

{"timestamp": 5000, "input_length": 600, "output_length": 9, "hash_ids": [9]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


@pytest.mark.parametrize(
    ("kind", "burstiness", "variation"),
    [("constant", 1.0, 0.0), ("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_arrivals_have_their_rate_and_variation(
    kind: ArrivalKind, burstiness: float, variation: float
) -> None:
    draw = random.Random(1)
    gaps = [draw_gap(kind, 8.0, burstiness, draw) for _ in range(20_000)]
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, abs=0.1)


def test_lengths_have_their_distributions() -> None:
    draw = random.Random(2)
    assert parse_length("128", "--prompt") == ConstantLength(128)
    uniform = [parse_length("uniform:64-512", "--prompt").draw(draw) for _ in range(5000)]
    assert min(uniform) == 64
    assert max(uniform) == 512
    skewed = [parse_length("lognormal:300,0.5,2000", "--prompt").draw(draw) for _ in range(20000)]
    assert mean(skewed) == pytest.approx(300, rel=0.05)
    assert max(skewed) <= 2000


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "many", "uniform:9-3", "uniform:5", "lognormal:5", "lognormal:nan,1", "zipf:3"],
)
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"--output: expected N"):
        parse_length(text, "--output")


def test_mooncake_is_read_with_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE)
    found = read_trace(path)
    assert [r.at for r in found] == [1.0, 3.0, 5.0]
    assert [(r.prompt, r.output) for r in found] == [(1100, 5), (1030, 7), (600, 9)]
    assert [r.blocks for r in found] == [(0, 1, 2), (0, 1, 3), (9,)]


def test_azure_is_read_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    found = read_trace(path)
    assert [(r.prompt, r.output) for r in found] == [(374, 44), (396, 109)]
    assert found[1].at - found[0].at == pytest.approx(4.314579, abs=1e-3)
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.jsonl", "", "holds no request"),
        ("t.jsonl", MOONCAKE + "{", r"t.jsonl:5: .*truncated"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 2}', r":1: .*output_length"),
        ("t.jsonl", MOONCAKE + MOONCAKE, ":5: earlier than the request before it"),
        ("t.jsonl", MOONCAKE.replace("600", "-600"), ":4: a prompt of -600 tokens"),
        ("t.csv", "a,b\n1,2\n", "no column TIMESTAMP"),
        ("t.csv", AZURE.replace("396", "x"), ":3: .*invalid literal"),
        ("t.csv", AZURE.replace("396,109", "396"), ":3: "),
    ],
)
def test_broken_traces_are_refused_with_the_line(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StartupError, match=says):
        read_trace(tmp_path / name)
