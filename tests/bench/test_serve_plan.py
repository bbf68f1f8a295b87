"""What the load generator plans to send: arrivals, lengths, traces, prompts, options."""

from __future__ import annotations

import json
import random
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench.serve.arrivals import Kind, times
from bench.serve.lengths import Fixed, Uniform, draw_lengths, parse_length, parse_mix
from bench.serve.options import Options
from bench.serve.plan import Item, Pace, Piece, Sharing, bounded, drawn, traced
from bench.serve.prompts import Prompts, id_pool, tokenizer_pool, word_pool
from bench.serve.traces import Line, fitted, read_trace
from protocol.errors import StartupError

DEMO = Path(__file__).parents[2] / "engine" / "demo" / "target"

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
    kind: Kind, burstiness: float, variation: float
) -> None:
    found = list(islice(times(kind, 8.0, burstiness, random.Random(1)), 20001))
    gaps = [b - a for a, b in pairwise(found)]
    assert found[0] == 0
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, abs=0.1)


def test_lengths_have_their_distributions() -> None:
    draw = random.Random(2)
    assert parse_length("128", "--input") == Fixed(128)
    uniform = [parse_length("uniform:64-512", "--input").draw(draw) for _ in range(5000)]
    assert min(uniform) == 64
    assert max(uniform) == 512
    skewed = [parse_length("lognormal:300,0.5,2000", "--input").draw(draw) for _ in range(20000)]
    assert mean(skewed) == pytest.approx(300, rel=0.05)
    assert max(skewed) <= 2000


def test_a_mix_keeps_its_weights() -> None:
    mix = parse_mix("0.75:128/64,0.25:uniform:1500-1600/8")
    assert mix[1][1:] == (Uniform(1500, 1600), Fixed(8))
    draw = random.Random(3)
    found = [draw_lengths(mix, draw) for _ in range(4000)]
    assert sum(f == (128, 64) for f in found) / 4000 == pytest.approx(0.75, abs=0.03)
    assert all(o == 8 for p, o in found if p > 1000)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "many", "uniform:9-3", "uniform:5", "lognormal:5", "lognormal:nan,1", "zipf:3"],
)
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"--output: expected N"):
        parse_length(text, "--output")


@pytest.mark.parametrize("text", ["128/64", "1:128", "0:1/1", "x:1/1", "1:1/0", "1:1/1,"])
def test_mixes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="--mix"):
        parse_mix(text)


def test_mooncake_becomes_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE)
    items = list(traced(read_trace(path), speedup=2.0, scale=1.0, context=None))
    assert [i.at for i in items] == [0.0, 1.0, 2.0]
    assert [(i.prompt, i.output) for i in items] == [(1100, 5), (1030, 7), (600, 9)]
    assert items[0].pieces == (Piece("block/0", 512), Piece("block/1", 512), Piece("block/2", 76))
    assert items[1].pieces[:2] == items[0].pieces[:2]
    assert items[2].pieces == (Piece("block/9", 512), Piece("own/2", 88))  # more than its ids cover


def test_a_scaled_trace_keeps_who_shares_what(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE)
    first, second, _ = traced(read_trace(path), speedup=1.0, scale=1 / 16, context=None)
    assert first.prompt == round(1100 / 16)
    assert first.pieces[:2] == second.pieces[:2] == (Piece("block/0", 32), Piece("block/1", 32))


def test_azure_is_read_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    found = read_trace(path)
    assert [(x.prompt, x.output) for x in found] == [(374, 44), (396, 109)]
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


def test_what_exceeds_the_context_is_cut() -> None:
    assert fitted(Line(0, 9000, 500), 1.0, 4096) == (3596, 500)
    assert fitted(Line(0, 9000, 9000), 1.0, 4096) == (2048, 2048)
    assert fitted(Line(0, 0, 0), 1.0, 4096) == (1, 1)


def _take(count: int, sharing: Sharing, seed: int, rate: float | None = None) -> list[Item]:
    pace = Pace("poisson", rate, 1.0) if rate else None
    return list(bounded(drawn(parse_mix("1:100/10"), sharing, pace, seed), count, None))


def test_a_seed_repeats_a_plan_and_the_rate_leaves_lengths_alone() -> None:
    assert _take(50, Sharing(0, 1), 1, 2.0) == _take(50, Sharing(0, 1), 1, 2.0)
    slow, fast = _take(50, Sharing(40, 8), 1, 2.0), _take(50, Sharing(40, 8), 1, 4.0)
    assert [i.pieces for i in slow] == [i.pieces for i in fast]
    assert [i.at for i in slow] == pytest.approx([2 * i.at for i in fast])


def test_groups_share_a_prefix_within_the_length() -> None:
    items = _take(60, Sharing(40, 3), 1)
    assert {i.prompt for i in items} == {100}
    assert {i.pieces[0] for i in items} == {Piece(f"group/{g}", 40) for g in range(3)}
    assert len({i.pieces[1] for i in items}) == 60


def test_a_duration_bounds_an_open_loop() -> None:
    items = bounded(drawn(parse_mix("1:9/9"), Sharing(0, 1), Pace("constant", 4, 1), 0), None, 2.0)
    assert [i.at for i in items] == [k / 4 for k in range(8)]


def _ids(prompts: Prompts, *pieces: Piece) -> list[int]:
    found: list[int] = json.loads(prompts.json(pieces))
    return found


def test_prompts_of_token_ids_are_exact_and_share_what_they_should() -> None:
    prompts = Prompts(id_pool(100, 4000), "s")
    for size in (1, 7, 8, 9, 512, 200_000):
        assert len(_ids(prompts, Piece("a", size))) == size
    long = _ids(prompts, Piece("a", 3000))
    assert all(100 <= i <= 4000 for i in long)
    assert _ids(prompts, Piece("a", 5)) == long[:5]
    assert _ids(prompts, Piece("a", 600), Piece("b", 10))[:600] == long[:600]
    assert _ids(prompts, Piece("b", 8)) != long[:8]
    assert _ids(Prompts(id_pool(100, 4000), "other"), Piece("a", 8)) != long[:8]


def test_a_tokenizer_makes_real_text() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = _ids(Prompts(tokenizer_pool(DEMO, ids=True), "s"), Piece("a", 300))
    assert len(ids) == 300
    assert max(ids) < tokenizer.get_vocab_size()
    text = json.loads(Prompts(tokenizer_pool(DEMO, ids=False), "s").json([Piece("a", 300)]))
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == pytest.approx(300, abs=12)
    assert tokenizer.decode(ids[8:]) in tokenizer.decode(ids)


def test_words_without_a_tokenizer() -> None:
    text = json.loads(Prompts(word_pool(), "s").json([Piece("a", 90), Piece("b", 10)]))
    assert len(text.split()) == 100


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"expected a tokenizer.json"):
        tokenizer_pool(tmp_path, ids=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match="cannot be read"):
        tokenizer_pool(tmp_path, ids=True)


def test_options_name_every_mistake() -> None:
    wrong: dict[str, Any] = {
        "url": "http://me:secret@host",
        "rate": 0.0,
        "concurrency": 3,
        "burstiness": 2.0,
        "timeout_s": -1,
        "extra_body": {"stream": False},
    }
    with pytest.raises(StartupError) as e:
        Options(**wrong).check()
    assert [line.split(":")[0] for line in str(e.value).splitlines()] == [
        "--url",
        "--extra-body",
        "expected exactly one of --rate, --concurrency and --trace",
        "--burstiness",
        "--rate",
        "--timeout",
    ]
    assert "secret" not in str(e.value)
    with pytest.raises(StartupError, match="--url: expected http"):
        Options(url="host:80", rate=1.0).check()


def test_the_warm_up_shares_nothing_with_the_load(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE)
    for options in (
        Options(url="http://h", rate=1.0, shared_prefix=50, warmup=3),
        Options(url="http://h", trace=str(path), warmup=3),
    ):
        options.check()
        warm = {p.key for i in options.warmup_plan() for p in i.pieces}
        assert len(warm) == 3
        assert not warm & {p.key for i in options.plan() for p in i.pieces}
