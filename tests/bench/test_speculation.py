"""The benchmark of speculation: its figures by hand, and a small contest."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from bench.speculation.contestants import DecodingContestant, DecodingLoad, Slices, compete
from bench.speculation.measurements import (
    CONTROLLER,
    SliceTiming,
    SpeedupCell,
    SpeedupInterval,
    StepTotals,
    speedup,
    tables,
)
from bench.speculation.targets import HeldOutTexts, RandomProposer, SyntheticProposer
from cluster.models.locate import demo_path
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.speculation.control.draft_lengths import FixedDraftLength

CPU = torch.device("cpu")


def test_the_formula_by_hand() -> None:
    plain = StepTotals(steps=10, tokens=10, seconds=1.0, pass_s=0.8)
    # Of 4 drafts of 3 tokens one was accepted as a whole, and two not at all.
    seen = StepTotals(4, 9, 1.0, 0.6, 0.2, Counter({3: 4}), accepted=5, rejected=3)
    a = 5 / 8
    assert seen.acceptance == a
    assert seen.expected() == pytest.approx(1 + a + a**2 + a**3)
    assert seen.predicted(plain) == pytest.approx(seen.expected() * 0.1 / (0.8 / 4 + 0.02))
    assert seen.each == 1 + 5 / 4
    seen.trees = True
    assert seen.expected() == seen.each


def test_a_speed_up_and_its_interval() -> None:
    ratio = speedup(
        [SliceTiming(2.0, 1), SliceTiming(4.0, 2)], [SliceTiming(1.0, 1), SliceTiming(2.0, 2)]
    )
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    slow_and_quick = [SliceTiming(1.0, 1)] * 10 + [SliceTiming(3.0, 1)] * 10
    ratio = speedup(slow_and_quick, [SliceTiming(2.0, 2)] * 20)
    assert 1.2 < ratio.low < ratio.value == 2.0 < ratio.high < 2.8


def test_a_table_has_a_line_for_each_batch() -> None:
    plain = StepTotals(10, 10, 1.0, 0.8)
    seen = StepTotals(5, 10, 0.5, 0.3, 0.1, Counter({1: 5}), accepted=5)
    cells = [
        SpeedupCell("demo, x", b, k, SpeedupInterval(1.5, 1.4, 1.6), plain, seen)
        for b in (1, 4)
        for k in (2, 0)
    ]
    assert CONTROLLER == 0
    (table,) = tables(cells)
    assert table.splitlines()[4] == "| 1 | 10/s | 1.00 | 1.50 (2.00) | 1.50 | 1.40-1.60 |"
    assert len(table.splitlines()) == 6


@pytest.fixture(scope="module")
def contestants() -> list[DecodingContestant]:
    config = load_config(demo_path())
    weights = load_weights(demo_path(), config, torch.float32, CPU)
    return [DecodingContestant(config, weights, batch=2, pages=64) for _ in range(3)]


def test_contestants_say_the_same(contestants: list[DecodingContestant]) -> None:
    plain, fixed, controlled = contestants
    prompts = list(itertools.islice(HeldOutTexts().stretches(65), 4))
    fixed.equip(lambda engine, most: RandomProposer(most, 4096), 2, FixedDraftLength(2))
    controlled.equip(lambda engine, most: RandomProposer(most, 4096), 4, None)
    loads = [DecodingLoad(prompts[:2], 16), DecodingLoad(prompts[2:], 16, 0.8)]
    found = compete(contestants, loads, Slices(count=4, tokens=8))
    assert [len(times) for times in found] == [4, 4, 4]
    assert plain.seen.steps == 4 * 8 and not plain.seen.lengths
    assert fixed.seen.lengths.keys() == {2} and fixed.seen.acceptance < 0.2
    assert 0 < fixed.seen.pass_s < fixed.seen.seconds


def test_another_text_is_an_error(contestants: list[DecodingContestant]) -> None:
    prompts = list(itertools.islice(HeldOutTexts().stretches(65), 2))
    plain, other, _ = contestants

    class Changed(DecodingContestant):
        def stop(self) -> None:
            super().stop()
            self.texts[0][3] += 1

    other.__class__ = Changed
    with pytest.raises(RuntimeError, match="sequence 0 has another text"):
        compete([plain, other], [DecodingLoad(prompts[:1], 16)], Slices(1, 8))
    other.__class__ = DecodingContestant


def test_synthetic_drafts_are_accepted_as_often_as_they_should(
    contestants: list[DecodingContestant],
) -> None:
    plain, fixed, _ = contestants
    load = DecodingLoad(list(itertools.islice(HeldOutTexts().stretches(65), 1)), 64)
    plain.start(load)
    plain.slice(150)
    text = [*load.prompts[0], *plain.texts[0]]
    plain.stop()
    fixed.equip(
        lambda engine, most: SyntheticProposer(most, lambda _: text, 0.75), 1, FixedDraftLength(1)
    )
    compete([plain, fixed], [load], Slices(8, 16))
    assert 0.6 < fixed.seen.acceptance < 0.9
