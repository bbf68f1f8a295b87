"""Grown heads say what the small ones say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.lib.engines import SHAPE_100M
from bench.speculation.grown_model import grow, grow_heads
from cluster.models.locate import demo_path
from engine.batching.attention_metadata import AttentionMetadata, decode_groups
from engine.model.decoder import DecoderModel
from engine.speculation.proposers.eagle_heads import EagleHead
from engine.speculation.proposers.medusa import MedusaHeads
from tests.engine.conftest import load_model
from tests.engine.heads import medusa_state, random_state, write

SMALL, WIDE = 256, SHAPE_100M["hidden_size"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderModel, DecoderModel]:
    grown = grow(demo_path(), tmp_path_factory.mktemp("grown"), {**SHAPE_100M, **LAYERS})
    return load_model(demo_path()), load_model(grown)


LAYERS = {"num_hidden_layers": 6}
EAGLE = {
    "fc.weight": (SMALL, 2 * SMALL),
    "fc.bias": (SMALL,),
    "embed_tokens.weight": (4096, SMALL),
    "layers.0.self_attn.q_proj.weight": (256, SMALL),
    "layers.0.self_attn.k_proj.weight": (128, SMALL),
    "layers.0.self_attn.v_proj.weight": (128, SMALL),
    "layers.0.self_attn.o_proj.weight": (SMALL, 256),
    "layers.0.mlp.gate_proj.weight": (704, SMALL),
    "layers.0.mlp.up_proj.weight": (704, SMALL),
    "layers.0.mlp.down_proj.weight": (SMALL, 704),
    "layers.0.post_attention_layernorm.weight": (SMALL,),
}


def test_medusa(models: tuple[DecoderModel, DecoderModel], tmp_path: Path) -> None:
    small = write(tmp_path / "small", medusa_state(models[0]), {"medusa_num_heads": 3})
    grown = grow_heads(small, tmp_path / "grown", SHAPE_100M)
    features = torch.randn(4, SMALL, generator=torch.Generator().manual_seed(1))
    wide = F.pad(features, (0, WIDE - SMALL))
    expected, found = (
        MedusaHeads(models[0], small)(features, 3),
        MedusaHeads(models[1], grown)(wide, 3),
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def run(head: EagleHead, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
    """Token after token of one sequence: [tokens, hidden]."""
    out = []
    for i, token in enumerate(tokens):
        at = torch.tensor([i])
        groups = decode_groups(torch.zeros(1, 1, dtype=torch.int64), at + 1, 0, torch.float32)
        args = torch.tensor([token]), features[i : i + 1], at, at
        out.append(head(*args, AttentionMetadata(1, groups, ())))
    return torch.cat(out)


def test_eagle(models: tuple[DecoderModel, DecoderModel], tmp_path: Path) -> None:
    config = json.loads((demo_path() / "config.json").read_text())
    small = write(tmp_path / "small", random_state(EAGLE), {**config, "num_hidden_layers": 1})
    grown = grow_heads(small, tmp_path / "grown", {**SHAPE_100M, **LAYERS})
    features = torch.randn(6, SMALL, generator=torch.Generator().manual_seed(1))
    tokens = [5, 700, 9, 4000, 5, 6]
    expected = run(EagleHead(models[0], small, 1, 64), tokens, features)
    found = run(EagleHead(models[1], grown, 1, 64), tokens, F.pad(features, (0, WIDE - SMALL)))
    torch.testing.assert_close(found[:, :SMALL], expected, atol=1e-3, rtol=1e-4)
    assert not found[:, SMALL:].any()
