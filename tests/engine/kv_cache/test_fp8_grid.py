"""The fp8 grid: nearest e4m3 value under a power-of-two scale, once and for all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache import fp8_grid

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def vectors(rows: int, spread: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, 2, 3, 16] of widely different sizes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, 3, 16, generator=generator)
    x *= torch.exp2(torch.randn(rows, 2, 3, 1, generator=generator) * spread)
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0.0
    return x.to(dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    fp8_grid.round_to_grid_(y)
    return y


def bytes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    payload = torch.empty(x.shape, dtype=torch.uint8)
    exponents = torch.empty(x.shape[:-1], dtype=torch.uint8)
    fp8_grid.encode(x, payload, exponents)
    return payload, exponents


def values_of(payload: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(payload.shape, dtype=dtype)
    fp8_grid.decode(payload, exponents, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 2.0, 6.0])
def test_rounding_equals_torch_e4m3_under_the_scale(dtype: torch.dtype, spread: float) -> None:
    x = vectors(400, spread, 1, dtype)
    largest = x.float().abs().amax(-1, keepdim=True)
    exponent = torch.log2(largest.double() / 448).ceil().clamp(-15, 7)
    scale = torch.exp2(exponent).float()
    scaled = (x.float() / scale).clamp(-448, 448)
    expected = (scaled.to(torch.float8_e4m3fn).float() * scale).to(dtype)
    assert torch.equal(rounded(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_encoded_bytes_decode_to_the_rounded_values(dtype: torch.dtype) -> None:
    x = vectors(700, 4.0, 2, dtype)
    assert torch.equal(values_of(*bytes_of(x), dtype), rounded(x))
    # What is rounded already keeps its values: a pool may hold them either way.
    assert torch.equal(values_of(*bytes_of(rounded(x)), dtype), rounded(x))


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 12), dtype=st.sampled_from(DTYPES))
def test_rounding_twice_changes_nothing(seed: int, spread: float, dtype: torch.dtype) -> None:
    once = rounded(vectors(50, spread, seed, dtype))
    assert torch.equal(rounded(once), once)


def test_every_byte_round_trips() -> None:
    """All 254 e4m3 values, at every exponent, against torch's own decoding."""
    code = torch.arange(256, dtype=torch.uint8)
    code = code[(code & 0x7F) != 0x7F]  # not a number
    for exponent in range(fp8_grid.MIN_EXPONENT, fp8_grid.MAX_EXPONENT + 1):
        biased = torch.full((1,), exponent - fp8_grid.MIN_EXPONENT, dtype=torch.uint8)
        got = values_of(code[None], biased, torch.float32)[0]
        assert torch.equal(got, code.view(torch.float8_e4m3fn).float() * 2.0**exponent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_by_cast_gives_the_same_values(dtype: torch.dtype) -> None:
    """What a GPU does, for every byte at every exponent."""
    code = torch.arange(256, dtype=torch.uint8)
    code = code[(code & 0x7F) != 0x7F]
    scales = fp8_grid.MAX_EXPONENT - fp8_grid.MIN_EXPONENT + 1
    payload, exponents = code.repeat(scales, 1), torch.arange(scales, dtype=torch.uint8)
    out = torch.empty(payload.shape, dtype=dtype)
    fp8_grid.decode_by_cast(payload, exponents, out)
    assert torch.equal(out, values_of(payload, exponents, dtype))
    assert torch.isfinite(out).all()


def test_infinity_and_nan_do_not_spread() -> None:
    x = torch.ones(4, 2, 1, 16)
    x[0, 0, 0, 3] = float("nan")
    x[1, 1, 0, 5] = float("inf")
    x[2, 0, 0, 7] = -float("inf")
    y = rounded(x)
    assert torch.isfinite(y).all()
    assert torch.equal(values_of(*bytes_of(x), torch.float32), y)
    assert torch.equal(y[3], x[3])


def test_strided_views_are_rounded_in_place() -> None:
    """As the model does: keys and values are columns of the projection."""
    projected = torch.randn(40, 8, 16)
    kv = projected[:, 2:].unflatten(1, (2, 3))
    expected = rounded(kv)
    fp8_grid.round_to_grid_(kv)
    assert torch.equal(projected[:, 2:].unflatten(1, (2, 3)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_error_is_that_of_three_mantissa_bits(dtype: torch.dtype) -> None:
    x = vectors(300, 1.0, 3, dtype).float()
    error = (rounded(x) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    # Half a step: 1/16 of the value, or of the smallest normal number of the vector's scale.
    assert (error <= torch.maximum(x.abs() / 16, largest * 2.0**-13)).all()
