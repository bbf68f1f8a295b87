"""A grown model says what the small one says."""

from __future__ import annotations

import pytest
import torch

from bench.lib.engines import SHAPE_100M, engine_config
from bench.speculation.grown_model import grow
from cluster.models.locate import demo_path
from engine.execution.engine import Engine
from engine.model.decoder import DecoderModel
from engine.scheduling.step_policy import plan_decode_step
from tests.engine.conftest import drain, load_model, request
from tests.gpu.reference import logits_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderModel, DecoderModel]:
    grown = grow(demo_path(), tmp_path_factory.mktemp("grown"))
    return load_model(demo_path()), load_model(grown)


def test_it_has_the_shape(models: tuple[DecoderModel, DecoderModel]) -> None:
    c = models[1].config
    assert [c.hidden_size, c.intermediate_size, c.layers, c.heads, c.kv_heads, c.head_dim] == list(
        SHAPE_100M.values()
    )
    assert 90e6 < models[1].weights.bytes / 4 < 100e6


def test_logits_are_those_of_the_small_one(models: tuple[DecoderModel, DecoderModel]) -> None:
    tokens = torch.randint(3, 4096, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    small, grown = (logits_of(model, tokens[:1], tokens[1:], "exact") for model in models)
    assert small.std() > 1
    torch.testing.assert_close(grown, small, atol=1e-4, rtol=1e-4)


def test_greedy_text_is_that_of_the_small_one(models: tuple[DecoderModel, DecoderModel]) -> None:
    sizes = engine_config(pages=16, max_batch=4, chunk=64, max_model_len=512)
    texts = []
    for model in models:
        engine = Engine(model, sizes, plan_decode_step)
        for handle in range(4):
            engine.generate(handle, request("a", [30 + handle, 100, 7], max_tokens=32))
        texts.append(drain(engine))
    assert texts[0] == texts[1]
