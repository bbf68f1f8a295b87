"""Floors, worked out by hand, and the measurements that they rest on."""

from __future__ import annotations

import torch

from bench.gpu.models import TINY
from bench.lib.roofline import MachineLimits, ModelCost, bandwidth, gemm_rate
from engine.model.decoder import DecoderModel
from engine.model.weights import random_weights, tensor_shapes
from engine.model_config.families import parse_config

CPU = torch.device("cpu")
COST = ModelCost(
    weight_bytes=4000, parameters=1000, head_parameters=100, attention_width=10, kv_bytes=8.0
)


def test_a_decode_step_by_hand() -> None:
    floor = COST.decode(MachineLimits(bandwidth=100.0, rate=50.0), batch=3, context=20)
    assert floor.bytes_s == (4000 + 3 * 20 * 8) / 100
    assert floor.operations_s == (2 * 1000 * 3 + 4 * 10 * 3 * 20) / 50
    assert floor.wall == "operations" and floor.seconds == floor.operations_s
    assert COST.decode(MachineLimits(100.0, 1e9), 3, 20).wall == "bytes"


def test_a_prefill_by_hand() -> None:
    floor = COST.prefill(MachineLimits(bandwidth=100.0, rate=50.0), sequences=2, tokens=30)
    assert floor.bytes_s == (4000 + 2 * 30 * 8) / 100
    assert floor.operations_s == 2 * (2 * 900 * 30 + 2 * 100 + 4 * 10 * 30 * 30 / 2) / 50


def test_the_parameters_are_those_of_the_matrices() -> None:
    config = parse_config({**TINY, "tie_word_embeddings": False}, "test")
    cost = ModelCost.of(
        DecoderModel(config, random_weights(config, torch.float32, CPU), 64), kv_bytes=1.0
    )
    matrices = {name: a * b for name, (a, *rest) in tensor_shapes(config) for b in rest}
    head = matrices["lm_head.weight"]
    assert matrices.pop("model.embed_tokens.weight") == head == cost.head_parameters
    assert cost.parameters == sum(matrices.values()) == cost.weight_bytes / 4


def test_measured_limits_are_those_of_a_computer() -> None:
    torch.set_num_threads(1)
    assert 1e8 < bandwidth(1 << 22, CPU) < 1e13
    assert 1e8 < gemm_rate(256, torch.float32, CPU) < 1e14
