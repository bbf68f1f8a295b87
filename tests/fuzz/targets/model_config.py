"""Configs of hostile models (engine/model_config, cluster/models, engine/speculation).

A config is refused with a StartupError, or every number in it is one that a process can bear.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from cluster.models.locate import check_model_folder
from engine.model_config.checkpoint import load_config
from engine.model_config.config import ModelConfig
from engine.model_config.families import FAMILIES, parse_config
from engine.speculation.draft_source import check_vocabularies, read_head_config
from protocol.errors import StartupError
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import Budget, FuzzTarget

_FOLDER = tempfile.TemporaryDirectory(prefix="baton-fuzz-model-")
_BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_KEYS = (
    *_BASE,
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("eos_token_id", "sliding_window", "layer_types", "use_sliding_window", "hidden_act"),
    *("max_window_layers", "mlp_only_layers", "decoder_sparse_step", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "sliding_window_pattern"),
    *("rope_local_base_freq", "quantization_config", "tie_word_embeddings", "hidden_activation"),
    *("norm_topk_prob", "architectures", "attention_bias"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2, 3, 1 << 31, 1 << 63, 10**30, 10**400, 0.5, -0.5, 1e308, math.inf),
    *(-math.inf, math.nan, "", "7", "x" * 300, [], [1], [[]], {}, {"a": 1}, [None], ["x"] * 9),
    *({"rope_type": "linear", "factor": 0}, {"rope_type": "llama3"}, ["sliding_attention"] * 4),
    *({"full_attention": {}, "sliding_attention": {"rope_theta": -1}}, {"type": ["x"]}),
)


def fuzz_one(data: bytes) -> None:
    """The bytes as the files of a folder, and as choices among keys and values."""
    _files(data)
    _choices(ByteReader(data))


def _files(data: bytes) -> None:
    folder = Path(_FOLDER.name)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_bytes(data)
    for read in (load_config, read_head_config, check_model_folder):
        try:
            found = read(folder)
        except StartupError as error:
            assert len(str(error)) < 2000, "an error quotes the file"
            continue
        if isinstance(found, ModelConfig):
            _check(found)
    (folder / "generation_config.json").unlink()
    try:
        check_vocabularies(folder, folder)
        load_config(folder)
    except StartupError:
        return


def _choices(reader: ByteReader) -> None:
    raw: dict[str, Any] = dict(_BASE)
    raw["architectures"] = [list(FAMILIES)[reader.number(len(FAMILIES))]]
    for _ in range(min(12, reader.left)):
        raw[_KEYS[reader.number(len(_KEYS))]] = _VALUES[reader.number(len(_VALUES))]
    try:
        config = parse_config(raw, "config")
    except (StartupError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return
    _check(config)
    assert json.loads(json.dumps(raw)) is not None


def _check(config: ModelConfig) -> None:
    """What is made from a config is bounded, and its numbers are numbers."""
    assert 1 <= config.layers <= 1 << 12 and len(config.windows) == config.layers
    sizes = (config.vocab_size, config.hidden_size, config.heads, config.kv_heads, config.head_dim)
    assert all(type(size) is int and 1 <= size < 1 << 32 for size in sizes)
    assert all(
        type(token) is int and 0 <= token < config.vocab_size for token in config.eos_token_ids
    )
    scales = (config.norm_eps, config.attention_scale, config.embedding_scale)
    assert all(type(scale) is float and math.isfinite(scale) for scale in scales)
    kv = config.kv_format("exact", "wide", 2)
    assert 0 < kv.bytes_per_token < 1 << 60


# A layer takes some hundred bytes, and a config may name 4,096 of them.
TARGET = FuzzTarget("model_config", fuzz_one, Budget(base_bytes=4 << 20, bytes_per_byte=600))
