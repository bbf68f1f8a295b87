"""The engine on a device against the CPU in fp32: every way in which a text can come about."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Codec, Precision, split_into_pieces
from engine.scheduling.step_policy import plan_decode_step
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Request
from tests.engine.conftest import drain, request
from tests.gpu.conftest import FAMILIES, model_of
from tests.gpu.reference import EPSILON, assert_within, logits_of, shortfall

PRECISIONS: list[Precision] = ["exact", "fp8"]
DTYPES = [torch.float32, torch.bfloat16]


def engine_on(
    device: str, dtype: torch.dtype, precision: Precision, family: str = "llama", **sizes: Any
) -> Engine:
    """As a worker would have it there: on a GPU, fp8 KV is stored as bytes. Steps have no budget,
    because chunks that depend on measured times round otherwise from run to run."""
    base = {"pages": 400, "max_batch": 32, "chunk": 64, "max_model_len": 400, **sizes}
    base.setdefault("step_budget_ms", 0.0)
    storage = "fp8" if precision == "fp8" and device == "cuda" else "wide"
    config = engine_config(**{"kv_precision": precision, "kv_storage": storage, **base})
    return Engine(model_of(family, dtype, device), config, plan_decode_step)


def requests(count: int, new_tokens: int = 24, **sampling: Any) -> list[Request]:
    """Prompts of 1 to 200 tokens; some share a prefix."""
    draw = random.Random(count)
    shared = [draw.randrange(3, 1000) for _ in range(70)]

    def prompt(i: int) -> list[int]:
        own = [draw.randrange(3, 1000) for _ in range(draw.choice([1, 31, 32, 33, 100, 200]))]
        return shared + own if i % 4 == 0 else own

    return [
        request(f"r{i}", prompt(i), max_tokens=new_tokens + i % 5, seed=i, **sampling)
        for i in range(count)
    ]


def hold(engine: Engine, texts: Iterable[tuple[Request, list[int]]], family: str = "llama") -> None:
    """Every text is whole, and its tokens are as good as the reference's best."""
    precision, reference = engine.config.kv_precision, model_of(family, torch.float32, "cpu")
    short = []
    for wanted, text in texts:
        assert len(text) == wanted.sampling.max_tokens
        logits = logits_of(reference, list(wanted.prompt), text, precision)
        short.append(shortfall(logits, text, len(wanted.prompt), wanted.sampling))
    routed = reference.config.moe is not None
    assert_within(torch.cat(short), engine.model.dtype, precision, routed)


def run(engine: Engine, wanted: list[Request]) -> list[list[int]]:
    for handle, each in enumerate(wanted):
        engine.generate(handle, each)
    return [text for _, text in sorted(drain(engine).items())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_of_32_with_prompts_in_chunks(
    device: str, dtype: torch.dtype, precision: Precision, family: str
) -> None:
    engine = engine_on(device, dtype, precision, family)
    wanted = requests(32)
    hold(engine, zip(wanted, run(engine, wanted), strict=True), family)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("chunk", [16, 512])
def test_other_chunks(device: str, chunk: int, precision: Precision) -> None:
    engine = engine_on(device, torch.bfloat16, precision, chunk=chunk)
    wanted = requests(5)
    hold(engine, zip(wanted, run(engine, wanted), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_preempted(device: str, dtype: torch.dtype) -> None:
    engine = engine_on(device, dtype, "exact", pages=16)
    preempted, preempt = [], engine.scheduler._preempt

    def counted(sequence: Any) -> None:
        preempted.append(sequence.handle)
        preempt(sequence)

    engine.scheduler._preempt = counted  # type: ignore[method-assign]
    wanted = requests(12, new_tokens=60)
    texts = run(engine, wanted)
    assert preempted and engine.manager.available == 16
    hold(engine, zip(wanted, texts, strict=True))


def hand_over(p: Engine, d: Engine, wanted: Request, codec: Codec) -> list[int]:
    """Prefill on one engine, move the KV through host memory, decode on the other."""
    cached = d.receive(0, wanted) // BLOCK_TOKENS
    d.reserve(0)
    p.prefill(0, wanted)
    first = drain(p)[0]
    d.plan()
    page_layer = p.format.block_layer_bytes(codec)
    frame = torch.zeros(1 << 18, dtype=torch.uint8)  # some blocks
    for piece in split_into_pieces(
        cached, p.computed_blocks(0), p.format.layers, page_layer, len(frame)
    ):
        size = p.read(0, piece, frame, codec)
        d.write(0, piece, frame[:size], codec)
    p.drop(0)
    d.join(0, first[0])
    return first + drain(d)[0]


@pytest.mark.parametrize(
    ("precision", "codec"), [("exact", Codec.RAW), ("fp8", Codec.RAW), ("fp8", Codec.FP8)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_handed_over(device: str, dtype: torch.dtype, precision: Precision, codec: Codec) -> None:
    p, d = (engine_on(device, dtype, precision) for _ in "pd")
    twice = [wanted for wanted in requests(6) for _ in "12"]  # then only what is missing travels
    hold(d, [(wanted, hand_over(p, d, wanted, codec)) for wanted in twice])
    assert p.manager.available == d.manager.available == 400


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.FP8])
def test_handed_over_between_kinds_of_device(device: str, codec: Codec) -> None:
    """A pool of values on a CPU, one of bytes on the device; the wire is the same."""
    p = engine_on("cpu", torch.bfloat16, "fp8")
    d = engine_on(device, torch.bfloat16, "fp8", kv_storage="fp8")
    hold(d, [(wanted, hand_over(p, d, wanted, codec)) for wanted in requests(4)])
    hold(p, [(wanted, hand_over(d, p, wanted, codec)) for wanted in requests(6)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampled_rows_beside_greedy_ones(device: str, dtype: torch.dtype) -> None:
    """Draws are what the seed, the logits and the position make them; filtered and penalised rows
    run beside them, and log-probabilities are those of the reference."""
    engine = engine_on(device, dtype, "exact")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8},
        {"temperature": 1.3, "logprobs": 0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    ]
    wanted = [requests(20, **kinds[i % 5])[i] for i in range(20)]
    for handle, each in enumerate(wanted):
        engine.generate(handle, each)
    text: dict[int, list[int]] = {}
    reports: dict[int, list[float]] = {}
    while step := engine.plan():
        for out in engine.run(step):
            text.setdefault(out.handle, []).append(out.token)
            if out.logprobs is not None:
                reports.setdefault(out.handle, []).append(out.logprobs.logprob)
    assert sorted(text) == list(range(20))
    hold(engine, [(wanted[handle], text[handle]) for handle in text if handle % 5 < 3])
    for handle, each in enumerate(wanted):
        if each.sampling.logprobs is not None:
            close(each, text[handle], reports[handle], dtype)


def close(wanted: Request, text: list[int], reported: list[float], dtype: torch.dtype) -> None:
    """Reported log-probabilities are within epsilon, in logits, of the reference's."""
    logits = logits_of(model_of("llama", torch.float32, "cpu"), list(wanted.prompt), text, "exact")
    expected = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])[:, 0]
    error = (torch.tensor(reported) - expected).abs() / logits.std(-1)
    assert error.max() <= EPSILON[dtype, "exact"], error
