"""The fp8 grid of KV: e4m3 values times a power of two per token, K or V, and head.

    x  ->  round(x / 2^e) * 2^e        e = ceil(log2(max |x| / 448)), within MIN_EXPONENT..MAX

Rounding is to nearest, ties to even, on the e4m3 grid of the OCP 8-bit floating point
specification (section 5.1: 3 bits of mantissa, subnormals of 2^-9, largest 448), saturating. The
scale is a power of two, so rounding twice changes nothing: a pool may hold the rounded values wide
or as bytes, and the wire may carry either. The range of exponents keeps all values exact in fp16,
too. NaN becomes 0, because a stored NaN would spread to other sequences through masked attention.

Rounding, encoding and decoding are the same tensor arithmetic on every device, on a CPU in portions
that stay in a core's cache. Only decoding on a GPU uses torch's e4m3 type, which moves a fifth of
the bytes there and takes three times as long on a CPU.
The KV pools call this module; ``engine.kernels`` has the same arithmetic for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MIN_EXPONENT, MAX_EXPONENT = -15, 7
_LARGEST = 448.0 * 2.0**MAX_EXPONENT
_BITS_OF_448 = 0x43E00000  # as fp32
_HALF_STEP = 2.0**-10
"""Half of the smallest e4m3 value. Scaled values up to here are rounded to 0."""

PORTION = 1 << 17
"""Elements that are computed at once on a CPU. Each portion costs some 30 us of calls: on a core
with 1 MiB of cache an element is encoded in 1.3 ns at this size, and in 2.1 at a quarter of it."""


def round_to_grid_(x: Tensor) -> None:
    """Round x [rows, ..., head_dim] to the grid in place."""
    for part in _portions(x):
        values = part if part.dtype == torch.float32 else part.float()
        _round_(values)
        if values is not part:
            part.copy_(values)


def encode(x: Tensor, payload: Tensor, exponents: Tensor) -> None:
    """Write x [rows, ..., head_dim], rounded to the grid, to ``payload`` [rows, ..., head_dim] and
    ``exponents`` [rows, ...], both uint8. Values on the grid are encoded exactly."""
    for part, data, biased in zip(
        _portions(x), _portions(payload), exponents.split(_rows(x)), strict=True
    ):
        values, magnitudes, exponent = _prepare(part.float())
        scaled = torch.mul(values, _power(-exponent), out=magnitudes)
        # Without this, small negative values would become a negative zero.
        torch.hardshrink(scaled, _HALF_STEP, out=scaled)
        data.view(torch.float8_e4m3fn).copy_(scaled)  # rounds to nearest, ties to even
        biased.copy_(exponent.sub_(MIN_EXPONENT)[..., 0])


def decode(payload: Tensor, exponents: Tensor, out: Tensor) -> None:
    """Write the exact values of ``payload`` [rows, ..., head_dim] and ``exponents`` [rows, ...] to
    ``out`` [rows, ..., head_dim] of any floating type. No byte is 0x7F or 0xFF, which stand for
    NaN: ``encode`` writes neither, and the pools refuse received frames that hold them."""
    if payload.device.type != "cpu":
        decode_by_cast(payload, exponents, out)
        return
    for data, biased, part in zip(
        _portions(payload), exponents.split(_rows(payload)), _portions(out), strict=True
    ):
        # Shift the byte's bits to their places in fp32, whose exponent bias is 120 higher.
        bits = data.view(torch.int8).to(torch.int32).bitwise_left_shift_(20)
        values = bits.bitwise_and_(-0x78100000).view(torch.float32)
        scale = _power(biased[..., None].to(torch.int32) + (MIN_EXPONENT + 120))
        if part.dtype == torch.float32:
            torch.mul(values, scale, out=part)
        else:
            part.copy_(values.mul_(scale))


def decode_by_cast(payload: Tensor, exponents: Tensor, out: Tensor) -> None:
    """Decode ``payload`` [rows, ..., head_dim] as ``decode`` does, with torch's e4m3 type. Value,
    scale and product are exact in each type of ``out``, so they need no wider one."""
    scale = _power(exponents[..., None].to(torch.int32) + MIN_EXPONENT)
    values = payload.view(torch.float8_e4m3fn).to(out.dtype)
    torch.mul(values, scale.to(out.dtype), out=out)


def _rows(x: Tensor) -> int:
    """Return the rows of a portion. A GPU takes all rows at once, to launch fewer kernels."""
    if x.device.type != "cpu":
        return max(1, len(x))
    return max(1, PORTION // max(1, x[:1].numel()))


def _portions(x: Tensor) -> Iterator[Tensor]:
    yield from x.split(_rows(x))


def _power(exponent: Tensor) -> Tensor:
    """Return 2 ** exponent exactly, int32 [...] to fp32 [...]."""
    return (exponent + 127).bitwise_left_shift_(23).view(torch.float32)


def _prepare(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [..., head_dim] fp32 without NaN and within the grid's range (x itself where nothing
    changes), its magnitudes in a new tensor, and the exponents e [..., 1] int32."""
    magnitudes = x.abs()
    largest = magnitudes.amax(-1, keepdim=True)  # vector_norm would take 14 times as long
    # The comparison is false for NaN. A GPU would have to wait for its result.
    if x.device.type != "cpu" or not bool((largest <= _LARGEST).all()):
        x = x.nan_to_num(nan=0.0).clamp_(-_LARGEST, _LARGEST)
        magnitudes = x.abs()
        largest = magnitudes.amax(-1, keepdim=True)
    # The bits of a float grow with its value, so this is the ceiling of log2(largest / 448).
    exponent = (largest.view(torch.int32) - (_BITS_OF_448 - 0x7FFFFF)) >> 23
    return x, magnitudes, exponent.clamp_(MIN_EXPONENT)


def _round_(x: Tensor) -> None:
    """Round x [..., head_dim] fp32 in place."""
    values, magnitudes, exponent = _prepare(x)
    # The power of two below each value, but at least the grid's smallest normal number.
    power = magnitudes.view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    power = torch.maximum(power, _power(exponent - 6), out=power)
    # Adding and subtracting 1.5 * 2^23 steps leaves a multiple of the step: the adder rounds.
    magic = power.mul_(1.5 * 2.0**20)
    torch.add(values, magic, out=x).sub_(magic)
