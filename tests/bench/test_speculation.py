"""The benchmark of speculation: its figures by hand, and a small contest."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from bench.speculation_proposers import Guess, Synthetic
from bench.speculation_report import CONTROLLER, Cell, tables
from bench.speculation_runs import Contestant, Load, Slices, compete
from bench.speculation_seen import Ratio, Seen, Taken, speedup
from bench.speculation_text import Texts
from cluster.models import demo_path
from engine.checkpoint import load_config
from engine.speculation.lengths import FixedLength
from engine.weights import load_weights

CPU = torch.device("cpu")


def test_the_formula_by_hand() -> None:
    plain = Seen(steps=10, tokens=10, seconds=1.0, pass_s=0.8)
    # Of 4 drafts of 3 tokens one was accepted as a whole, and two not at all.
    seen = Seen(4, 9, 1.0, 0.6, 0.2, Counter({3: 4}), accepted=5, rejected=3)
    a = 5 / 8
    assert seen.acceptance == a
    assert seen.expected() == pytest.approx(1 + a + a**2 + a**3)
    assert seen.predicted(plain) == pytest.approx(seen.expected() * 0.1 / (0.8 / 4 + 0.02))
    assert seen.each == 1 + 5 / 4
    seen.trees = True
    assert seen.expected() == seen.each


def test_a_speed_up_and_its_interval() -> None:
    ratio = speedup([Taken(2.0, 1), Taken(4.0, 2)], [Taken(1.0, 1), Taken(2.0, 2)])
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    slow_and_quick = [Taken(1.0, 1)] * 10 + [Taken(3.0, 1)] * 10
    ratio = speedup(slow_and_quick, [Taken(2.0, 2)] * 20)
    assert 1.2 < ratio.low < ratio.value == 2.0 < ratio.high < 2.8


def test_a_table_has_a_line_for_each_batch() -> None:
    plain = Seen(10, 10, 1.0, 0.8)
    seen = Seen(5, 10, 0.5, 0.3, 0.1, Counter({1: 5}), accepted=5)
    cells = [
        Cell("demo, x", b, k, Ratio(1.5, 1.4, 1.6), plain, seen) for b in (1, 4) for k in (2, 0)
    ]
    assert CONTROLLER == 0
    (table,) = tables(cells)
    assert table.splitlines()[4] == "| 1 | 10/s | 1.00 | 1.50 (2.00) | 1.50 | 1.40-1.60 |"
    assert len(table.splitlines()) == 6


@pytest.fixture(scope="module")
def contestants() -> list[Contestant]:
    config = load_config(demo_path())
    weights = load_weights(demo_path(), config, torch.float32, CPU)
    return [Contestant(config, weights, batch=2, pages=64) for _ in range(3)]


def test_contestants_say_the_same(contestants: list[Contestant]) -> None:
    plain, fixed, controlled = contestants
    prompts = list(itertools.islice(Texts().stretches(65), 4))
    fixed.equip(lambda engine, most: Guess(most, 4096), 2, FixedLength(2))
    controlled.equip(lambda engine, most: Guess(most, 4096), 4, None)
    loads = [Load(prompts[:2], 16), Load(prompts[2:], 16, 0.8)]
    found = compete(contestants, loads, Slices(count=4, tokens=8))
    assert [len(times) for times in found] == [4, 4, 4]
    assert plain.seen.steps == 4 * 8 and not plain.seen.lengths
    assert fixed.seen.lengths.keys() == {2} and fixed.seen.acceptance < 0.2
    assert 0 < fixed.seen.pass_s < fixed.seen.seconds


def test_another_text_is_an_error(contestants: list[Contestant]) -> None:
    prompts = list(itertools.islice(Texts().stretches(65), 2))
    plain, other, _ = contestants

    class Changed(Contestant):
        def stop(self) -> None:
            super().stop()
            self.texts[0][3] += 1

    other.__class__ = Changed
    with pytest.raises(RuntimeError, match="sequence 0 has another text"):
        compete([plain, other], [Load(prompts[:1], 16)], Slices(1, 8))
    other.__class__ = Contestant


def test_synthetic_drafts_are_accepted_as_often_as_they_should(
    contestants: list[Contestant],
) -> None:
    plain, fixed, _ = contestants
    load = Load(list(itertools.islice(Texts().stretches(65), 1)), 64)
    plain.start(load)
    plain.slice(150)
    text = [*load.prompts[0], *plain.texts[0]]
    plain.stop()
    fixed.equip(lambda engine, most: Synthetic(most, lambda _: text, 0.75), 1, FixedLength(1))
    compete([plain, fixed], [load], Slices(8, 16))
    assert 0.6 < fixed.seen.acceptance < 0.9
