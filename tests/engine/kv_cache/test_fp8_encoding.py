"""Encoding by a cast gives the bytes of integer arithmetic, for every bf16 and fp16 value and many
fp32 ones. The kernels keep that arithmetic, so both ends of a transfer agree on every byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kv_cache import fp8_grid

LARGEST = 448.0 * 2.0**fp8_grid.MAX_EXPONENT
BITS_OF_448 = 0x43E00000


def power(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def encode_by_arithmetic(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes, biased exponents and rounded values of x [rows, head_dim]: each value is
    rounded by an addition, and its bits are shifted from fp16 to e4m3."""
    x = x.float().nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST)
    largest = x.abs().amax(-1, keepdim=True)
    exponent = (largest.view(torch.int32) - (BITS_OF_448 - 0x7FFFFF)) >> 23
    exponent = exponent.clamp(fp8_grid.MIN_EXPONENT)
    below = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    magic = torch.maximum(below, power(exponent - 6)) * (1.5 * 2.0**20)
    rounded = (x + magic) - magic
    bits = (rounded * power(-8 - exponent)).half().view(torch.int16)
    payload = ((bits >> 7) & 0x7F) | ((bits >> 8) & 0x80)
    biased = exponent[..., 0] - fp8_grid.MIN_EXPONENT
    return payload.to(torch.uint8), biased.to(torch.uint8), rounded


def bits_of(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def check(x: Tensor) -> None:
    """Encode and round x [rows, head_dim] as it is, and without what exceeds the grid: the module
    takes another path for values that are all in range."""
    in_range = x.float().nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST).to(x.dtype)
    for values in (x, in_range):
        payload, exponents, rounded = encode_by_arithmetic(values)
        got = torch.empty(x.shape, dtype=torch.uint8)
        scales = torch.empty(x.shape[:-1], dtype=torch.uint8)
        source = values.clone()
        fp8_grid.encode(source, got, scales)
        assert torch.equal(got, payload)
        assert torch.equal(scales, exponents)
        assert torch.equal(bits_of(source), bits_of(values))  # the caller's values stay
        fp8_grid.round_to_grid_(source)
        assert torch.equal(bits_of(source), bits_of(rounded.to(x.dtype)))
        decoded = torch.empty_like(x)
        fp8_grid.decode(got, scales, decoded)
        assert torch.equal(decoded, source)


def every_value(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 16, 24, 128])
def test_every_value_among_its_neighbours(dtype: torch.dtype, head_dim: int) -> None:
    values = every_value(dtype)
    check(values[: len(values) // head_dim * head_dim].view(-1, head_dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", range(-17, 8))
def test_every_value_under_every_scale(dtype: torch.dtype, exponent: int) -> None:
    """Each is encoded beside a larger value, so that it is small under that scale: subnormal, a
    tie, or zero with its sign."""
    values = every_value(dtype)
    for largest in (448.0, 300.0):
        beside = torch.full_like(values, largest * 2.0**exponent)
        check(torch.stack([beside, values], -1))


@given(seed=st.integers(0, 10**6), head_dim=st.sampled_from([1, 2, 24, 64]))
def test_any_bits_of_fp32(seed: int, head_dim: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (200 * head_dim,), generator=draw)
    check(bits.to(torch.int32).view(torch.float32).view(-1, head_dim))


@given(seed=st.integers(0, 10**6))
def test_fp32_values_beside_the_ties_of_the_grid(seed: int) -> None:
    """Multiples of a 32nd of the smallest step, and the floats next to them."""
    draw = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 1024, (300, 4), generator=draw).float() / 32
    scales = torch.randint(-24, 6, (300, 1), generator=draw).float()
    values = steps * torch.exp2(scales - torch.randint(0, 10, (300, 4), generator=draw))
    beside = values.view(torch.int32) + torch.randint(-2, 3, (300, 4), generator=draw).int()
    signs = torch.randint(0, 2, (300, 4), generator=draw) * 2 - 1
    check(beside.clamp_min(0).view(torch.float32) * signs)


def test_nothing_may_be_encoded() -> None:
    check(torch.empty(0, 16))
