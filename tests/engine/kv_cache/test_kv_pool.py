"""Pools and codecs: under fp8, bytes or wide, compressed or not, the values are the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Codec, Precision, Storage, split_into_pieces
from engine.model.decoder import DecoderModel
from engine.scheduling.step_policy import plan_decode_step
from protocol.errors import StartupError, TransferFailed
from protocol.requests import Request
from tests.engine.conftest import drain, load_model, request
from tests.engine.families import save


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(save(tmp_path_factory.mktemp(request.param), request.param))


def engine(model: DecoderModel, storage: Storage, precision: Precision = "fp8") -> Engine:
    sizes = engine_config(
        pages=64,
        max_batch=8,
        chunk=48,
        max_model_len=1024,
        kv_precision=precision,
        kv_storage=storage,
    )
    return Engine(model, sizes, plan_decode_step)


def prompts() -> list[Request]:
    draw = random.Random(4)
    lengths = [1, 30, 33, 64, 100, 130]
    return [
        request(
            str(i),
            [draw.randrange(3, 320) for _ in range(n)],
            max_tokens=30,
            temperature=float(i % 2),
            seed=i,
        )
        for i, n in enumerate(lengths)
    ]


def together(engine: Engine) -> dict[int, list[int]]:
    for i, r in enumerate(prompts()):
        engine.generate(i, r)
    return drain(engine)


def test_fp8_pool_gives_the_same_text_as_a_wide_pool(model: DecoderModel) -> None:
    assert together(engine(model, "fp8")) == together(engine(model, "wide"))


def test_fp8_precision_changes_the_text(model: DecoderModel) -> None:
    assert together(engine(model, "wide")) != together(engine(model, "wide", "exact"))


def handed_over(p: Engine, d: Engine, codec: Codec) -> list[list[int]]:
    """Text of every other prompt, prefilled on ``p`` and decoded on ``d``."""
    texts = []
    size = p.format.block_layer_bytes(codec)
    assert size == d.format.block_layer_bytes(codec)
    for r in prompts()[::2]:
        p.prefill(0, r)
        first = drain(p)[0]
        cached = d.receive(0, r) // 32
        d.reserve(0)
        d.plan()
        for piece in split_into_pieces(
            cached, p.computed_blocks(0), p.format.layers, size, 16 << 10
        ):
            frame = torch.zeros(16 << 10, dtype=torch.uint8)
            nbytes = p.read(0, piece, frame, codec)
            assert nbytes == piece.bytes(size)
            d.write(0, piece, frame[:nbytes], codec)
        p.drop(0)
        d.join(0, first[0])
        texts.append(first + drain(d)[0])
    return texts


def test_pools_and_codecs_in_any_combination_give_the_same_text(model: DecoderModel) -> None:
    expected = handed_over(engine(model, "wide"), engine(model, "wide"), Codec.RAW)
    for p, d, codec in [
        ("wide", "wide", Codec.FP8),
        ("wide", "fp8", Codec.RAW),
        ("wide", "fp8", Codec.FP8),
        ("fp8", "wide", Codec.RAW),
        ("fp8", "wide", Codec.FP8),
        ("fp8", "fp8", Codec.RAW),
        ("fp8", "fp8", Codec.FP8),
    ]:
        got = handed_over(engine(model, p), engine(model, d), codec)  # type: ignore[arg-type]
        assert got == expected, (p, d, codec.name)


def test_pool_and_frame_sizes(model: DecoderModel) -> None:
    c = model.config
    wide, fp8 = engine(model, "wide").format, engine(model, "fp8").format
    values = 2 * c.layers * c.kv_heads * c.head_dim
    assert wide.bytes_per_token == 4 * values
    assert fp8.bytes_per_token == values + values // c.head_dim


@pytest.mark.parametrize("storage", ["wide", "fp8"])
@pytest.mark.parametrize("codec", Codec)
def test_frames_with_invalid_values_are_refused(
    model: DecoderModel, storage: Storage, codec: Codec
) -> None:
    d = engine(model, storage)
    size = d.format.block_layer_bytes(codec)
    piece = split_into_pieces(0, 1, d.format.layers, size, 1 << 20)[0]
    nbytes = piece.bytes(size)
    bad = [torch.full((nbytes // 4,), v).view(torch.uint8) for v in (float("nan"), 1e30)]
    if codec is Codec.FP8:
        bad = [torch.full((nbytes,), 255, dtype=torch.uint8)]
    for data in bad:
        d.receive(0, request("a", list(range(5, 40))))
        d.reserve(0)
        d.plan()
        with pytest.raises(TransferFailed, match=r"not finite|scales beyond"):
            d.write(0, piece, data, codec)
        d.drop(0)


@pytest.mark.parametrize("storage", ["wide", "fp8"])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [0, 1000, -1])
def test_one_byte_that_is_no_number_is_refused(
    model: DecoderModel, storage: Storage, byte: int, place: int
) -> None:
    """On a GPU it would decode to NaN."""
    d = engine(model, storage)
    size = d.format.block_layer_bytes(Codec.FP8)
    piece = split_into_pieces(0, 1, d.format.layers, size, 1 << 20)[0]
    data = torch.full((piece.bytes(size),), 0x7E, dtype=torch.uint8)
    payload = len(data) * d.format.head_dim // (d.format.head_dim + 1)
    data[payload:] = 22
    d.pool.write(piece, [0], data, Codec.FP8)  # the largest value at the largest scale
    data[place % payload] = byte
    with pytest.raises(TransferFailed, match="not a number in e4m3"):
        d.pool.write(piece, [0], data, Codec.FP8)


@pytest.mark.parametrize("storage", ["wide", "fp8"])
def test_raw_values_off_the_grid_stay_in_a_wide_pool_and_are_rounded_in_bytes(
    model: DecoderModel, storage: Storage
) -> None:
    """Only a sender that breaks the protocol sends them. They are bounded wherever they stay."""
    d = engine(model, storage)
    size = d.format.block_layer_bytes(Codec.RAW)
    piece = split_into_pieces(0, 1, d.format.layers, size, 1 << 20)[0]
    data = torch.full((piece.bytes(size) // 4,), 1.2345).view(torch.uint8)
    d.pool.write(piece, [1], data, Codec.RAW)
    out = torch.empty_like(data)
    d.pool.read(piece, [1], out, Codec.RAW)
    value = torch.tensor(1.2345 if storage == "wide" else 1.25)
    assert (out.view(torch.float32) == value).all()
    assert (data.view(torch.float32) == 1.2345).all()  # the frame itself stays as it came


@pytest.mark.parametrize("precision", ["exact", "fp8"])
def test_non_finite_kv_does_not_affect_other_sequences(
    model: DecoderModel, precision: Precision
) -> None:
    """One sequence's KV is infinite or no number; another one's text stays."""
    expected = engine(model, "wide", precision)
    expected.generate(1, request("b", list(range(5, 9)), max_tokens=20))
    text = drain(expected)[1]
    astray = engine(model, "wide", precision)
    for layer in range(model.config.layers):
        for value in (float("nan"), float("inf"), -1e38):
            kv = torch.full((8, 2, model.config.kv_heads, model.config.head_dim), value)
            astray.pool.store(layer, torch.arange(8), kv)  # page 0 pads, and is given out again
    astray.generate(1, request("b", list(range(5, 9)), max_tokens=20))
    assert drain(astray)[1] == text


def test_exact_precision_refuses_fp8_storage(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="precision fp8"):
        engine(load_model(save(tmp_path)), "fp8", "exact")
