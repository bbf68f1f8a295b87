"""The model made by hand copies real text."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from bench.lib.engines import SHAPE_100M, engine_config
from bench.speculation.copying_model import PERIOD, make_copying
from bench.speculation.targets import HeldOutTexts
from cluster.models.locate import demo_path
from engine.execution.engine import Engine
from engine.scheduling.step_policy import plan_decode_step
from tests.engine.conftest import drain, load_model, request


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="demo"),
        pytest.param({**SHAPE_100M, "num_hidden_layers": 2}, id="100M", marks=pytest.mark.long),
    ],
)
def test_it_copies(shape: dict[str, int], tmp_path: Path) -> None:
    model = load_model(make_copying(demo_path(), tmp_path, shape))
    engine = Engine(
        model, engine_config(pages=64, max_batch=4, chunk=512, max_model_len=512), plan_decode_step
    )
    files = list(itertools.islice(HeldOutTexts().stretches(PERIOD), 4))
    for handle, tokens in enumerate(files):
        engine.generate(handle, request("a", list(tokens), max_tokens=128))
    assert drain(engine) == {handle: list(tokens[:128]) for handle, tokens in enumerate(files)}
