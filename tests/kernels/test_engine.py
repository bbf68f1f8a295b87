"""An engine whose layers are computed by kernels draws the texts of the CPU's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Storage
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.scheduling.step_policy import plan_decode_step
from tests.engine.conftest import drain, request
from tests.engine.families import save
from tests.engine.grammars import Constrained, regex, save_tokenizer

pytestmark = pytest.mark.usefixtures("only_decode_graphs")

POSITIONS = 512


def engine(folder: Path, *, kernels: bool, storage: Storage = "wide", **changes: Any) -> Engine:
    device = torch.device("cuda" if kernels and torch.cuda.is_available() else "cpu")
    config = load_config(folder)
    weights = load_weights(folder, config, torch.float32, device)
    model = DecoderModel(config, weights, POSITIONS, kernels=kernels)
    sizes = {"pages": 64, "max_batch": 8, "chunk": 32, "max_model_len": POSITIONS, **changes}
    return Engine(model, engine_config(kv_storage=storage, **sizes), plan_decode_step)


def texts(own: Engine) -> dict[int, list[int]]:
    """Run prompts of several lengths, longer than a chunk and shorter than a block."""
    for handle, length in enumerate((3, 50, 31)):
        prompt = [3 + (handle * 7 + i * i) % 300 for i in range(length)]
        sampling = {"temperature": 0.8 * (handle % 2), "seed": handle}
        own.generate(handle, request(f"r{handle}", prompt, max_tokens=3 + handle, **sampling))
    return drain(own)


# Triton's interpreter takes half a millisecond for each program, so the models are small.
SMALL = {"num_hidden_layers": 2, "vocab_size": 320}


@pytest.mark.parametrize(
    ("family", "storage"),
    [
        ("gemma2", "fp8"),
        ("mixtral", "wide"),
        pytest.param("llama", "fp8", marks=pytest.mark.long),
        pytest.param("mistral", "wide", marks=pytest.mark.long),
        pytest.param("qwen3", "fp8", marks=pytest.mark.long),
    ],
)
def test_texts_are_those_of_the_cpu(family: str, storage: Storage, tmp_path: Path) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma2" else {}
    folder = save(tmp_path, family, **SMALL, **layers)
    precision = {"kv_precision": "fp8"}
    expected = texts(engine(folder, kernels=False, **precision))
    assert texts(engine(folder, kernels=True, storage=storage, **precision)) == expected


def test_steps_in_graphs_draw_the_same_texts(tmp_path: Path) -> None:
    """Without CUDA a replay computes again, from the memory that a graph would read."""
    folder = save(tmp_path, "llama", **SMALL)
    expected = texts(engine(folder, kernels=False, kv_precision="fp8"))
    sizes = {"max_batch": 3, "pages": 8, "kv_precision": "fp8"}
    own = engine(folder, kernels=True, storage="fp8", **sizes)
    own.record_graphs(lambda _: None)
    assert texts(own) == expected
    assert own.run_empty_graph(3)


def test_rows_that_need_more_than_a_temperature_are_drawn_after_the_graph(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", **SMALL)
    prompt = list(range(3, 20))
    wanted = {
        1: {"temperature": 0.9, "top_p": 0.8, "seed": 5},
        2: {"temperature": 0.0, "frequency_penalty": 1.5},
        3: {"temperature": 0.7, "seed": 6, "logprobs": 2},
        4: {"temperature": 0.0, "allowed_token_ids": (4, 9, 11)},
    }

    def run(own: Engine) -> dict[int, list[int]]:
        for handle, sampling in wanted.items():
            own.generate(handle, request(f"r{handle}", prompt, max_tokens=6, **sampling))
        return drain(own)

    own = engine(folder, kernels=True, max_batch=4, pages=8)
    own.record_graphs(lambda _: None)
    texts = run(own)
    assert texts == run(engine(folder, kernels=False))
    assert set(texts[4]) <= {4, 9, 11}


def test_a_step_is_launched_before_the_one_before_it_is_read(tmp_path: Path) -> None:
    """Texts that end at a stop token or are dropped, and requests that arrive, change nothing."""
    folder = save(tmp_path, "llama", **SMALL)

    def run(own: Engine, stop: int | None) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        stops = {} if stop is None else {"stop_token_ids": (stop,)}
        own.generate(1, request("a", [5, 6, 7], max_tokens=40, **stops))
        own.generate(2, request("b", [8, 9], max_tokens=36, temperature=0.8, seed=3))
        own.generate(3, request("c", [4], max_tokens=40))
        for step in range(200):
            if step == 6:
                own.drop(3)
                own.generate(4, request("d", [11, 12], max_tokens=5))
            plan = own.plan()
            if not plan and step > 6:
                break
            for token in own.run(plan):
                out.setdefault(token.handle, []).append(token.token)
        del out[3]  # how far it gets before it is dropped may differ
        return out

    whole = run(engine(folder, kernels=False), None)
    stop = whole[1][10]
    expected = run(engine(folder, kernels=False), stop)
    assert len(expected[1]) < len(whole[1])
    own = engine(folder, kernels=True, max_batch=3, pages=12)
    own.record_graphs(lambda _: None)
    assert run(own, stop) == expected
    assert own.steps_ahead > 20
    assert own.manager.available == own.manager.pages


def test_grammars_are_read_in_place(tmp_path: Path) -> None:
    """Rows with and without a grammar, in graphs and beside a prompt."""
    folder = save_tokenizer(save(tmp_path, "llama", **SMALL))
    config = load_config(folder)
    constrained = Constrained(folder, config.vocab_size, config.eos_token_ids)
    grammar = regex("(ab|cd|[0-9]){4}")

    def run(own: Engine) -> dict[int, list[int]]:
        for handle, temperature in ((1, 0.0), (2, 0.9), (3, 0.9)):
            more = {"grammar": grammar} if handle < 3 else {}
            sampling = {"temperature": temperature, "seed": handle, "max_tokens": 6, **more}
            asked = request(f"r{handle}", [5 + handle] * (3 + 15 * handle), **sampling)
            own.generate(handle, asked, constrained.of(asked))
        return drain(own)

    expected = run(engine(folder, kernels=False))
    own = engine(folder, kernels=True, max_batch=3, pages=8)
    own.record_graphs(lambda _: None)
    assert run(own) == expected
