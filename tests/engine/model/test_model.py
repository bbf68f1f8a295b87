"""Every family against transformers, in every way a prompt can reach the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.model_config.checkpoint import load_config
from engine.scheduling.step_policy import plan_decode_step
from protocol.errors import StartupError
from tests.engine.conftest import drain, load_model, request
from tests.engine.families import FAMILIES, reference_logits, save

LENGTH = 150
WITHIN = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 320, (LENGTH,), generator=generator).tolist()


@pytest.fixture(scope="module")
def expected(folder: Path, tokens: list[int]) -> torch.Tensor:
    return reference_logits(folder, tokens)


class Spied:
    """An engine that notes, for each of its sequences, the logits of every token drawn."""

    def __init__(self, folder: Path, chunk: int = 512) -> None:
        sizes = engine_config(pages=96, chunk=chunk, max_model_len=1024)
        self.engine = Engine(load_model(folder), sizes, plan_decode_step)
        self.logits: dict[int, list[torch.Tensor]] = {}
        self._logits = self.engine.model.logits
        self._last = torch.empty(0)
        self.engine.model.logits = self._spy  # type: ignore[method-assign]

    def _spy(self, hidden: torch.Tensor) -> torch.Tensor:
        self._last = self._logits(hidden)
        return self._last

    def run(self) -> None:
        while step := self.engine.plan():
            drawing = [s.handle for s in step.decode]
            drawing += [s.handle for s, n in step.chunks if s.remaining == n]
            self.engine.run(step)
            for handle, row in zip(drawing, self._last, strict=True):
                self.logits.setdefault(handle, []).append(row)


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() < WITHIN * expected.abs().max())


@pytest.mark.parametrize("chunk", [512, 64, 33])
def test_logits_match_transformers_for_whole_and_chunked_prompts(
    folder: Path, tokens: list[int], expected: torch.Tensor, chunk: int
) -> None:
    spied = Spied(folder, chunk)
    spied.engine.generate(1, request("a", tokens, max_tokens=1))
    spied.run()
    assert close(spied.logits[1][0], expected[-1])


def test_logits_match_transformers_after_a_cached_prefix(
    folder: Path, tokens: list[int], expected: torch.Tensor
) -> None:
    spied = Spied(folder)
    spied.engine.generate(1, request("a", tokens[:100], max_tokens=1))
    spied.run()
    spied.engine.generate(2, request("b", tokens, max_tokens=1))
    spied.engine.plan()
    assert spied.engine.scheduler.sequences[2].cached == 96
    spied.run()
    assert close(spied.logits[2][0], expected[-1])


def test_logits_of_decode_steps_in_a_mixed_batch_match_prefill(
    folder: Path, tokens: list[int]
) -> None:
    """Prompts of many lengths decode together while others prefill; each row is teacher-forced by
    what the engine drew, and transformers computes the whole text at once."""
    spied = Spied(folder, chunk=48)
    lengths = [1, 2, 31, 32, 33, 60, 97, 110]
    for handle, length in enumerate(lengths):
        spied.engine.generate(handle, request(str(handle), tokens[:length], max_tokens=40))
    kept = dict(spied.engine.scheduler.sequences)
    spied.run()
    for handle, length in enumerate(lengths):
        expected = reference_logits(folder, kept[handle].tokens)
        got = torch.stack(spied.logits[handle])
        assert close(got, expected[length - 1 : length - 1 + len(got)])


def test_greedy_text_matches_transformers(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder = save(tmp_path)
    prompt = list(range(5, 75))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False
    )
    engine = Engine(
        load_model(folder), engine_config(pages=64, max_model_len=1024), plan_decode_step
    )
    engine.generate(1, request("a", prompt, max_tokens=40))
    # min_new_tokens keeps transformers from choosing the end token; so must we, to compare.
    assert 2 not in expected[0, len(prompt) :]
    assert drain(engine)[1] == expected[0, len(prompt) :].tolist()


def test_sharded_weights_equal_a_single_file(tmp_path: Path) -> None:
    whole, sharded = save(tmp_path / "one"), save(tmp_path / "many", shard="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    texts = []
    for folder in (whole, sharded):
        engine = Engine(
            load_model(folder), engine_config(pages=8, max_model_len=128), plan_decode_step
        )
        engine.generate(1, request("a", list(range(5, 40)), max_tokens=30))
        texts.append(drain(engine))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM is not supported"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights (awq)"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"hidden_size": "many"}, "not a usable model config"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["recurrent"]}, "'recurrent'"),
    ],
)
def test_unsupported_config_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    """Before any weight is read: the folder has none."""
    config = {**json.loads((save(tmp_path / "m") / "config.json").read_text()), **changes}
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError) as error:
        load_config(bare)
    assert named in str(error.value)
    assert str(bare / "config.json") in str(error.value)


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "llama3-rope"])
def test_configs_of_older_transformers_parse_to_the_same_shape(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path, family)
    now = load_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    if family == "gemma3":
        raw["rope_theta"] = rope["full_attention"].pop("rope_theta")
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        raw["rope_scaling"] = rope["full_attention"]
    elif family == "gemma2":
        raw["rope_theta"] = rope["rope_theta"]
        del raw["layer_types"]
    else:
        raw["rope_theta"] = rope.pop("rope_theta")
        raw["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(raw))
    assert load_config(folder) == now


@pytest.mark.parametrize("prefix", ["Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma2"])
def test_absent_keys_have_the_defaults_of_transformers(tmp_path: Path, prefix: str) -> None:
    """Each key in turn is taken out; the rest is the family's own default config."""
    import transformers

    full = getattr(transformers, f"{prefix}Config")().to_dict()
    full["architectures"] = [f"{prefix}ForCausalLM"]
    keys = [
        *("num_key_value_heads", "sliding_window", "rms_norm_eps", "tie_word_embeddings"),
        *("attn_logit_softcapping", "final_logit_softcapping", "max_position_embeddings"),
        *("rope_parameters", "num_local_experts", "num_experts_per_tok", "eos_token_id"),
    ]
    (tmp_path / "config.json").write_text(json.dumps(full))
    expected = load_config(tmp_path)
    for key in keys:
        (tmp_path / "config.json").write_text(
            json.dumps({k: v for k, v in full.items() if k != key})
        )
        assert load_config(tmp_path) == expected, key


def test_end_token_beyond_the_vocabulary_is_ignored(tmp_path: Path) -> None:
    folder = save(tmp_path, eos_token_id=[2, 320])
    assert load_config(folder).eos_token_ids == (2,)
