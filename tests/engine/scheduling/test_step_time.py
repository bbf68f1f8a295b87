"""The model of a step's duration: what it learns, what it keeps, what it does not believe."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.engine import Engine
from engine.execution.warm_up import warm_up
from engine.scheduling.step_time import MIN_STEP_S, StepTimeModel, StepTimer
from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.step_model import StepModel, StepWork

TRUE = StepModel(2e-3, 1e-4, 1e-7, 5e-5, 2e-8)


def mixed(draw: random.Random) -> StepWork:
    """A step as a decode worker has it, now and then with a chunk."""
    rows = draw.randrange(0, 33)
    tokens = draw.choice([0, 0, 0, 32, 100, 512]) if rows else 512
    context = draw.choice([0, 512, 2048])
    pairs = tokens * (context + tokens / 2)
    return StepWork(rows, rows * draw.randrange(50, 2000), tokens, pairs)


def decode_only(draw: random.Random) -> StepWork:
    rows = draw.randrange(1, 33)
    return StepWork(rows, rows * draw.randrange(50, 2000))


def teach(
    model: StepTimeModel, truth: StepModel, works: list[StepWork], draw: random.Random
) -> None:
    for work in works:
        model.observe(work, truth.seconds(work) * draw.lognormvariate(0, 0.05))


def worst(model: StepTimeModel, truth: StepModel, works: list[StepWork]) -> float:
    """Largest relative error."""
    found = model.coefficients
    return max(abs(found.seconds(w) / truth.seconds(w) - 1) for w in works)


@pytest.mark.parametrize("seed", range(3))
def test_model_learns_and_follows_changes(seed: int) -> None:
    draw = random.Random(seed)
    model = StepTimeModel()
    teach(model, TRUE, [mixed(draw) for _ in range(300)], draw)
    seen = [mixed(draw) for _ in range(100)]
    assert worst(model, TRUE, seen) < 0.1
    slower = StepModel(*(3 * c for c in TRUE))
    teach(model, slower, [mixed(draw) for _ in range(800)], draw)
    assert worst(model, slower, seen) < 0.1


def test_coefficients_without_new_data_stay() -> None:
    draw = random.Random(1)
    model = StepTimeModel()
    teach(model, TRUE, [mixed(draw) for _ in range(300)], draw)
    before = model.coefficients
    teach(model, TRUE, [decode_only(draw) for _ in range(20_000)], draw)
    after = model.coefficients
    assert after.prompt_token == pytest.approx(before.prompt_token, rel=0.02)
    assert after.prompt_pair == pytest.approx(before.prompt_pair, rel=0.02)


PAIR_ROWS = 2e-5  # of Llama-3-70B
BIG = StepModel(0.022, 1.5e-4, 5e-8, 2.7e-4, 2.7e-4 * PAIR_ROWS)


def prompt(tokens: int, chunk: int = 2048) -> list[StepWork]:
    """The steps of a prompt."""
    chunks = [(done, min(chunk, tokens - done)) for done in range(0, tokens, chunk)]
    return [StepWork(0, 0, u, u * (done + u / 2)) for done, u in chunks]


@pytest.mark.parametrize("efficiency", [0.5, 1.0, 2.0])
def test_short_prompts_do_not_tell_how_long_a_long_one_takes(efficiency: float) -> None:
    """Prompts of one chunk, then one of 131,072 tokens, of which pairs are half of the time.
    ``efficiency``: of attention, relative to products."""
    truth = BIG._replace(prompt_pair=BIG.prompt_pair / efficiency)
    whole_s = truth.prefill_s(0, 131_072, 2048)
    errors: dict[float, list[float]] = {0.0: [], PAIR_ROWS: []}
    for pair_rows, found in errors.items():
        for seed in range(6):
            draw, model = random.Random(seed), StepTimeModel(pair_rows)
            lengths = [draw.randint(200, 2048) for _ in range(600)]
            teach(model, truth, [w for n in lengths for w in prompt(n)], draw)
            assert worst(model, truth, prompt(2048)) < 0.1
            found.append(model.coefficients.prefill_s(0, 131_072, 2048) / whole_s)
    assert min(errors[PAIR_ROWS]) > 0.6 and max(errors[PAIR_ROWS]) < 1.8
    assert max(errors[0.0]) > 1.8, "without what the FLOPs say"


def test_long_prompts_tell_what_pairs_take_whatever_the_model_is() -> None:
    draw, model = random.Random(1), StepTimeModel(PAIR_ROWS / 8)
    lengths = [draw.randint(200, 32_768) for _ in range(60)]
    teach(model, BIG, [w for n in lengths for w in prompt(n)], draw)
    whole_s = BIG.prefill_s(0, 131_072, 2048)
    assert model.coefficients.prefill_s(0, 131_072, 2048) == pytest.approx(whole_s, rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_prompts_that_take_next_to_no_time_leave_the_fit_as_it_is(seed: int) -> None:
    """All steps take as long, by a clock that stands still."""
    draw, model = random.Random(seed), StepTimeModel(PAIR_ROWS)
    for work in [mixed(draw) for _ in range(200)]:
        model.observe(work, 0.0)
        assert model.coefficients.seconds(work) == pytest.approx(MIN_STEP_S, rel=0.01)


def test_hours_of_identical_steps_keep_the_fit_stable() -> None:
    draw = random.Random(2)
    model = StepTimeModel()
    work = StepWork(4, 4000)
    teach(model, TRUE, [work] * 20_000, draw)
    assert worst(model, TRUE, [work]) < 0.1
    teach(model, TRUE, [mixed(draw) for _ in range(300)], draw)
    assert worst(model, TRUE, [mixed(draw) for _ in range(100)]) < 0.1


LARGEST = [StepWork(0, 0, 2048, 2048 * 1024), StepWork(256, 8192), StepWork(256, 1 << 19)]


def on_a_gpu(work: StepWork) -> float:
    """Seconds of a step that reads the weights, and computes all rows meanwhile."""
    computing_s = 3e-5 * (work.decode_rows + work.prompt_tokens)
    return max(6e-3, computing_s) + 5e-8 * work.decode_kv_tokens + 1e-9 * work.prompt_pairs


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_largest_steps_are_known_however_long_steps_are_small(rows: int) -> None:
    """Up to 200 rows take no longer than one, so that small steps say nothing of more rows."""
    draw, model, without = random.Random(rows), StepTimeModel(), StepTimeModel()
    for work in LARGEST:
        with model.remembered():
            for times in (3.0, 1.0, 1.0):  # something else ran meanwhile
                model.observe(work, times * on_a_gpu(work))
    small = [StepWork(n := draw.randint(1, rows), n * draw.randint(50, 2000)) for _ in range(5000)]
    for work in small:
        for each in (model, without):
            each.observe(work, on_a_gpu(work) * draw.lognormvariate(0, 0.05))
    found = model.coefficients
    assert found[5:] == (256, 1 << 19, 2048)
    for work in LARGEST[1:]:
        assert found.decode_s(*work[:2]) == pytest.approx(on_a_gpu(work), rel=0.1)
    assert found.seconds(LARGEST[0]) == pytest.approx(on_a_gpu(LARGEST[0]), rel=0.1)
    for work in small[-50:]:
        assert found.seconds(work) == pytest.approx(on_a_gpu(work), rel=0.1)
    bounded_s = without.coefficients.decode_s(*LARGEST[1][:2])
    assert bounded_s > 2 * on_a_gpu(LARGEST[1])


@pytest.mark.parametrize("seed", range(3))
def test_prompts_alone_leave_what_decoding_was_measured_to_take(seed: int) -> None:
    """The first decode step after a prompt was once predicted to take next to no time, and counted
    for as much as thousands of others."""
    draw, model = random.Random(seed), StepTimeModel(PAIR_ROWS)
    for work in [*prompt(2048), *(StepWork(2, 2048 + 2 * i) for i in range(16))]:
        model.observe(work, on_a_gpu(work))
    for work in LARGEST:
        with model.remembered():
            model.observe(work, on_a_gpu(work))
    for _ in range(300):
        [work] = prompt(draw.randint(16, 2048))
        model.observe(work, on_a_gpu(work) * draw.uniform(0.95, 1.05))
    for work in LARGEST:
        assert model.coefficients.seconds(work) == pytest.approx(on_a_gpu(work), rel=0.2)
    [short] = prompt(512)
    assert model.coefficients.seconds(short) == pytest.approx(on_a_gpu(short), rel=0.2)


def test_one_of_the_first_steps_that_was_measured_too_short_is_soon_forgotten() -> None:
    draw, model = random.Random(8), StepTimeModel()
    for index in range(16):
        work = StepWork(2, 1000 + 2 * index)
        model.observe(work, on_a_gpu(work) * (0.01 if index == 10 else 1.0))
    for _ in range(100):
        work = StepWork(rows := draw.randint(1, 32), rows * draw.randint(50, 2000))
        model.observe(work, on_a_gpu(work))
    assert model.coefficients.seconds(StepWork(1, 1000)) > 0.8 * on_a_gpu(StepWork(1, 1000))


def test_large_steps_that_take_longer_than_at_the_start_are_believed() -> None:
    draw, model = random.Random(7), StepTimeModel()
    for work in LARGEST:
        with model.remembered():
            model.observe(work, on_a_gpu(work))
    large = [StepWork(n := draw.randint(150, 256), n * draw.randint(50, 2000)) for _ in range(400)]
    for work in large:
        model.observe(work, 1.5 * on_a_gpu(work))
    for work in large[-50:]:
        assert model.coefficients.seconds(work) == pytest.approx(1.5 * on_a_gpu(work), rel=0.15)
    largest_s = 1.5 * on_a_gpu(LARGEST[2])
    assert model.coefficients.decode_s(256, 1 << 19) == pytest.approx(largest_s, rel=0.1)


def test_outlier_changes_the_prediction_little() -> None:
    draw = random.Random(3)
    model = StepTimeModel()
    teach(model, TRUE, [mixed(draw) for _ in range(300)], draw)
    for work in [mixed(draw) for _ in range(3)]:
        model.observe(work, 100 * TRUE.seconds(work))
    assert worst(model, TRUE, [mixed(draw) for _ in range(100)]) < 0.2


def test_stalls_of_some_steps_do_not_move_the_prediction() -> None:
    """A fifth of the steps takes three times as long; their mean would be 40% above the others."""
    draw = random.Random(5)
    model = StepTimeModel()
    for work in [mixed(draw) for _ in range(1000)]:
        model.observe(work, TRUE.seconds(work) * draw.choice([0.95, 1.0, 1.0, 1.05, 3.0]))
    assert worst(model, TRUE, [mixed(draw) for _ in range(100)]) < 0.15


def test_waiting_for_a_core_is_a_factor_for_all_work() -> None:
    """While others compute on the same core, and again alone, the engine only decodes; the
    prediction for prompts follows."""
    draw = random.Random(6)
    model = StepTimeModel()
    teach(model, TRUE, [mixed(draw) for _ in range(300)], draw)
    works = [mixed(draw) for _ in range(100)]
    for work in [decode_only(draw) for _ in range(100)]:
        own_s = TRUE.seconds(work)
        model.observe(work, 2 * own_s, waited_s=own_s)
    assert model.slowdown == pytest.approx(2, rel=0.02)
    assert worst(model, StepModel(*(2 * c for c in TRUE)), works) < 0.1
    teach(model, TRUE, [decode_only(draw) for _ in range(100)], draw)
    assert model.slowdown == pytest.approx(1, rel=0.02)
    assert worst(model, TRUE, works) < 0.1


def test_a_step_waits_while_its_thread_has_no_core() -> None:
    clock, core = iter([0.0, 0.5, 1.0, 1.5]), iter([0.0, 0.1, 0.1, 0.6])
    model, expected = StepTimeModel(), StepTimeModel()
    timer = StepTimer(model, lambda: next(clock), lambda: next(core))
    for waited_s in (0.4, 0.0):
        timer.begin()
        timer.end(StepWork(1, 100), done=True)
        expected.observe(StepWork(1, 100), 0.5, waited_s=waited_s)
    assert model.coefficients == expected.coefficients and model.slowdown == expected.slowdown > 1


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 256),
            st.integers(0, 1 << 20),
            st.integers(0, 8192),
            st.integers(0, 1 << 17),
            st.floats(0, 1e3),
        ),
        max_size=60,
    )
)
def test_coefficients_are_never_negative(steps: list[tuple[int, int, int, int, float]]) -> None:
    model = StepTimeModel()
    for rows, kv, tokens, context, seconds in steps:
        model.observe(StepWork(rows, kv, tokens, tokens * (context + tokens / 2)), seconds)
        assert all(0 <= c < float("inf") for c in model.coefficients)


@given(
    seconds=st.floats(1e-4, 1),
    computed=st.integers(0, 1 << 17),
    pair=st.sampled_from([0.0, 1e-9, 2e-8]),
)
def test_prompt_tokens_within_inverts_the_prediction(
    seconds: float, computed: int, pair: float
) -> None:
    model = StepModel(1.0, 0.0, 0.0, 5e-5, pair)
    u = model.prompt_tokens_within(seconds, computed)
    added = model.prompt_token * u + model.prompt_pair * u * (computed + u / 2)
    assert added == pytest.approx(seconds)
    assert model.prompt_tokens_within(0.0, computed) == 0


def test_steps_without_a_known_end_are_measured_with_the_next() -> None:
    now = iter([0.0, 0.5, 1.0, 9.0, 9.25])
    model, sums = StepTimeModel(), StepTimeModel()
    timer = StepTimer(model, lambda: next(now))
    for done in (False, True):
        timer.begin()
        timer.end(StepWork(0, 0, 512, 512 * 256), done=done)
    sums.observe(StepWork(0, 0, 1024, 1024 * 256), 0.5, 2)
    assert model.coefficients == sums.coefficients
    timer.begin()
    timer.end(StepWork(0, 0, 512, 512 * 256), done=False)
    timer.idle()  # dropped before its end: the time until the next one is nobody's
    timer.begin()
    timer.end(StepWork(1, 100), done=True)
    sums.observe(StepWork(1, 100), 0.25)
    assert model.coefficients == sums.coefficients


def test_warm_up_fits_the_step_time_model(make_engine: Callable[..., Engine]) -> None:
    work = StepWork(0, 0, 64, 64 * 32)
    for _ in range(3):  # steps of a busy machine may take as long with a prompt as without
        engine = make_engine()
        warm_up(engine)
        known = engine.step_time.known
        assert known is not None and known.seconds(work) > 0
        added_s = known.added_seconds(work)
        if added_s > 0:
            break
    assert added_s > 0
    config = engine.config
    pool = config.pages * BLOCK_TOKENS
    assert known.rows_seen == max(16, config.max_batch)
    assert known.prompt_tokens_seen == max(256, config.prefill_chunk)
    assert known.kv_tokens_seen == max(32768, pool - config.max_batch)
    assert not engine.scheduler.sequences and engine.manager.available == 64
    assert engine.scheduler.take_started() == []


def test_observing_a_step_is_cheap() -> None:
    draw = random.Random(4)
    model = StepTimeModel()
    works = [mixed(draw) for _ in range(2000)]
    best = float("inf")
    for _ in range(3):
        began = time.thread_time()
        for work in works:
            model.observe(work, TRUE.seconds(work))
        best = min(best, (time.thread_time() - began) / len(works))
    assert best < 150e-6  # 15 us where nothing else runs


def test_drafts_that_a_device_computes_first_are_no_part_of_the_step() -> None:
    now = iter(float(at) for at in range(100))
    model, alone = StepTimeModel(), StepTimeModel()
    timer = StepTimer(model, lambda: next(now))
    for _ in range(20):
        timer.begin()
        timer.end(StepWork(8, 100), done=True, before_s=0.75)
        alone.observe(StepWork(8, 100), 0.25)
    assert model.known is not None and model.known == alone.known
