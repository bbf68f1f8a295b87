"""The fp8 grid of KV inside kernels; the reference is ``engine.kv_cache.fp8_grid``.

Values are rounded and packed with integer operations in fp32, because sm_80 has no conversion to
e4m3 and Triton's interpreter rounds it wrongly.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on the CPU. Matrix products are computed in fp32 there, because those of the
interpreter in 16 bits are wrong."""


@cache
def converts_e4m3(device: torch.device) -> bool:
    """Return whether the GPU ``device`` has instructions that convert e4m3 (sm_89 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


MIN_EXPONENT = tl.constexpr(-15)
MAX_EXPONENT = tl.constexpr(7)
LARGEST = tl.constexpr(448.0 * 2.0**7)
_BITS_OF_448 = tl.constexpr(0x43E00000)


@triton.jit
def power_of_two(exponent):
    """Return 2 ** exponent exactly: int32 to fp32, for -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite(x):
    """Return x fp32 with 0 for NaN, clamped to the largest magnitude of any pool."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def round_rows(x):
    """Round x [rows, columns] fp32 to the grid, with one scale for each row. Return the values and
    the exponents of their scales [rows] int32."""
    x = finite(x)
    largest = tl.max(tl.abs(x), 1)  # [rows]
    # The bits of a float grow with its value, so this is the ceiling of log2(largest / 448).
    exponent = (largest.to(tl.int32, bitcast=True) - (_BITS_OF_448 - 0x7FFFFF)) >> 23
    exponent = tl.maximum(exponent, MIN_EXPONENT)
    # The power of two below each value, but at least the grid's smallest normal number.
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, power_of_two(exponent - 6)[:, None])
    # Rounding to a multiple of power / 8, ties to even: the adder does it.
    magic = power * 1572864.0  # 1.5 * 2^20
    return (x + magic) - magic, exponent


@triton.jit
def pack_e4m3(x, exponent):
    """Return the e4m3 bytes, as uint8, of x [rows, columns] fp32 on the grid with the scales
    2 ** exponent [rows]."""
    # e4m3 is fp16 with an exponent 8 lower and 7 bits less of mantissa.
    half = (x * power_of_two(-8 - exponent)[:, None]).to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    return (((bits >> 7) & 0x7F) | ((bits >> 8) & 0x80)).to(tl.uint8)


@triton.jit
def unpack_e4m3(data):
    """Return the values of e4m3 bytes (uint8) without their scale, as fp32; exact."""
    wide = data.to(tl.int8, bitcast=True).to(tl.int32) << 20
    # The byte's bits are at their places in fp32, whose exponent bias is 120 higher.
    return (wide & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def e4m3_values(data, NATIVE: tl.constexpr):
    """Return the values of e4m3 bytes (uint8) without their scale, in a type that holds them
    exactly; ``NATIVE``: the GPU has instructions for it."""
    if NATIVE:
        values = data.to(tl.float8e4nv, bitcast=True)
    else:
        values = unpack_e4m3(data)
    return values


_CONVERT = """{{ .reg .b32 bytes; .reg .b16 low, high;
prmt.b32 bytes, $1, $1, {bytes};
mov.b32 {{low, high}}, bytes;
cvt.rn.f16x2.e4m3x2 $0, low; }}"""
"""Converts two bytes of two pairs to two fp16 values; Triton's own conversion needs twice the
instructions, because it extracts every byte first."""

_CONVERT_LOWER = tl.constexpr(_CONVERT.format(bytes="0x0020"))
_CONVERT_UPPER = tl.constexpr(_CONVERT.format(bytes="0x0031"))


@triton.jit
def e4m3_halves(pairs, UPPER: tl.constexpr, NATIVE: tl.constexpr):
    """Return the lower or upper values of ``pairs`` (int16) of e4m3 bytes, as ``e4m3_values``."""
    if NATIVE:
        values = tl.inline_asm_elementwise(
            _CONVERT_UPPER if UPPER else _CONVERT_LOWER,
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        values = unpack_e4m3(((pairs >> (8 if UPPER else 0)) & 0xFF).to(tl.uint8))
    return values
