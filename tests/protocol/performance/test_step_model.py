"""Predictions for steps of sizes that were seen, and of those that were not."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from engine.scheduling.step_time import LEAST_SEEN, StepTimeModel
from protocol.performance.step_model import (
    PRIOR_STEP_MODEL,
    TRUSTED_RATIO,
    StepModel,
    StepWork,
    complete_step_model,
    mean_step_model,
    parse_step_model,
    trusted_alike,
)

CONTEXT = 1000


class Roofline:
    """Decode steps of a dense model: reading weights or computing rows, whichever is longer, and
    reading KV. The figures are of a GPU with 3.35 TB/s and 990 TFLOP/s in 16 bits."""

    def __init__(self, parameters: float, element_bytes: float, kv_bytes: float) -> None:
        self._weights_s = parameters * element_bytes / (0.8 * 3.35e12)
        self._row_s = 2.0 * parameters / (0.7 * 990e12 * 2.0 / element_bytes)
        self._kv_s = kv_bytes / (0.8 * 3.35e12)

    def seconds(self, rows: float, kv_tokens: float) -> float:
        return 1e-3 + max(self._weights_s, rows * self._row_s) + kv_tokens * self._kv_s


DENSE_8B = Roofline(8e9, 2.0, 131_072)
COMPUTE_BOUND_FROM_64 = Roofline(8e9, 2.0, 131_072)
COMPUTE_BOUND_FROM_64._row_s = COMPUTE_BOUND_FROM_64._weights_s / 64


def fitted(device: Roofline, most: int) -> StepModel:
    """Return what an engine reports after steps of up to ``most`` rows."""
    draw, model = random.Random(1), StepTimeModel()
    for _ in range(400):
        rows = draw.randint(1, most)
        kv_tokens = rows * draw.randint(CONTEXT // 2, 2 * CONTEXT)
        seconds = device.seconds(rows, kv_tokens) * draw.lognormvariate(0.0, 0.02)
        model.observe(StepWork(rows, kv_tokens), seconds)
    assert model.known is not None
    return model.known


@pytest.mark.parametrize("rows", [16, 64, 96, 128, 192, 256, 512])
def test_no_step_is_predicted_shorter_than_it_is(rows: int) -> None:
    known = fitted(DENSE_8B, 64)
    assert known.rows_seen == pytest.approx(64, rel=0.05)
    predicted, actual = known.decode_s(rows, rows * CONTEXT), DENSE_8B.seconds(rows, rows * CONTEXT)
    assert predicted >= 0.9 * actual
    assert predicted <= 1.1 * actual or rows > TRUSTED_RATIO * 64


@pytest.mark.parametrize("rows", [128, 256, 512])
def test_a_line_from_below_the_ridge_is_not_believed_above_it(rows: int) -> None:
    """Where computing takes longer from just the largest step on that was seen, the line is wrong
    by a factor; what is predicted is not."""
    known = fitted(COMPUTE_BOUND_FROM_64, 64)
    actual = COMPUTE_BOUND_FROM_64.seconds(rows, rows * CONTEXT)
    line_s = StepModel(*known[:5]).decode_s(rows, rows * CONTEXT)
    assert line_s < 0.9 * actual
    assert known.decode_s(rows, rows * CONTEXT) >= 0.95 * actual
    assert known.decode_s(256, 0) >= 4 * known.decode_s(64, 0) - 256 * known.row


def test_predictions_grow_without_jumps() -> None:
    model = PRIOR_STEP_MODEL._replace(rows_seen=64.0, kv_tokens_seen=64_000.0)
    seconds = [model.decode_s(rows / 4, rows / 4 * CONTEXT) for rows in range(4, 2000)]
    rises = [after - before for before, after in itertools.pairwise(seconds)]
    assert all(0 < rise < 0.02 * seconds[0] for rise in rises)
    assert model.decode_s(96, 0) == PRIOR_STEP_MODEL.decode_s(96, 0)
    assert model.decode_s(1, 200_000) > 3 * PRIOR_STEP_MODEL.step, "long contexts are work, too"


def test_a_prompt_in_larger_chunks_than_were_seen() -> None:
    model = PRIOR_STEP_MODEL._replace(prompt_tokens_seen=256.0)
    assert model.prefill_s(0, 300, 512) == PRIOR_STEP_MODEL.prefill_s(0, 300, 512)
    more_s = model.prefill_s(0, 1024, 512) - PRIOR_STEP_MODEL.prefill_s(0, 1024, 512)
    assert more_s == pytest.approx(2 * PRIOR_STEP_MODEL.step), "twice as large, two steps"


def test_what_was_seen_is_remembered_for_minutes_and_then_forgotten() -> None:
    model = StepTimeModel()
    for _ in range(20):
        model.observe(StepWork(100, 200_000), 20e-3)
    for _ in range(3000):
        model.observe(StepWork(2, 2000), 20e-3)
    assert 85 < model.coefficients.rows_seen < 95, "after a minute"
    for _ in range(4):
        model.observe(StepWork(270, 6000), 0.06, steps=3)
    assert model.coefficients.rows_seen < 95, "three steps of 90 rows, measured together"
    for _ in range(200_000 // 50):
        model.observe(StepWork(2, 2000), 1.0)
    assert model.coefficients[5:] == LEAST_SEEN


def test_workers_that_report_nothing_get_the_means_half_by_half() -> None:
    prefills = StepModel(0.0, 0.0, 0.0, 2e-5, 1e-9, 16.0, 32768.0, 2048.0)
    decodes = StepModel(4e-3, 1e-5, 1e-8, 0.0, 0.0, 128.0, 1e6, 256.0)
    other = decodes._replace(step=6e-3, rows_seen=64.0)
    mean = mean_step_model([prefills, decodes, other, None])
    assert mean == pytest.approx((5e-3, 1e-5, 1e-8, 2e-5, 1e-9, 128.0, 1e6, 2048.0))
    whole = complete_step_model(decodes, mean)
    assert (whole.rows_seen, whole.prompt_tokens_seen, whole.prompt_token) == (128, 2048, 2e-5)
    assert mean_step_model([]) == PRIOR_STEP_MODEL


@pytest.mark.parametrize(
    "seen",
    [
        *((0.0, 1e5, 256.0), (64.0, math.nan, 256.0), (64.0, 1e5, -math.inf)),
        *((1e300, 1e5, 256.0), (64.0, math.inf, 256.0)),
    ],
)
def test_sizes_that_no_step_has_are_refused(seen: tuple[float, float, float]) -> None:
    good = (*PRIOR_STEP_MODEL[:5], 64.0, 1e5, 256.0)
    assert parse_step_model(good) == good
    assert parse_step_model((*good[:5], *seen)) is None
    assert parse_step_model(good[:5]) == PRIOR_STEP_MODEL
    assert parse_step_model(good[:7]) is None


def test_workers_that_were_tried_less_are_trusted_as_far_as_the_others() -> None:
    line = StepModel(0.01, 1e-4, 0.0, 1e-5, 0.0)
    tried = line._replace(rows_seen=64.0, kv_tokens_seen=9e4, prompt_tokens_seen=64.0)
    new = line._replace(rows_seen=1.0, kv_tokens_seen=100.0, prompt_tokens_seen=512.0)
    models = trusted_alike({"tried": tried, "new": new})
    assert models["new"] == models["tried"]
    assert models["new"].decode_s(8, 1000) == line.decode_s(8, 1000) < new.decode_s(8, 1000) / 4
    assert models["tried"].prompt_tokens_seen == 512.0
    assert trusted_alike({}) == {}


def test_a_worker_that_does_not_say_what_it_has_seen_is_no_proof_of_large_steps() -> None:
    line = StepModel(0.01, 1e-4, 0.0, 1e-5, 0.0)
    tried = line._replace(rows_seen=64.0, kv_tokens_seen=9e4, prompt_tokens_seen=64.0)
    assert set(trusted_alike({"tried": tried, "silent": line}).values()) == {tried}
    assert mean_step_model([tried, line]) == tried
    assert trusted_alike({"silent": line}) == {"silent": line}
