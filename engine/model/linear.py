"""Products with a weight: rows times weight, plus a bias where there is one.

On a CPU the weight is laid out anew for oneDNN, which then multiplies few rows two to three times
faster than torch's own product on some processors (docs/benchmarks.md). Its kernels are made for
each number of rows, a few milliseconds each, so the rows are padded to one of few numbers
(engine/model_config/config.py). Where oneDNN has no product of the weight's type, torch's own
is used.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_config.config import padded_rows as padded_rows

SMALL_WORK = 400_000
"""Rows times elements of a weight up to which torch's own product is quicker (fp32, measured from
24 to 390 thousand elements)."""


class Linear(Protocol):
    """One weight [out, in] on its device."""

    bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] times the weight: [T, out]."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` [T, out] plus the product; a new tensor."""


class DenseLinear:
    """By torch's own product, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.bytes = _bytes(weight) + (0 if bias is None else _bytes(bias))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.weight.t())


class PackedLinear:
    """By oneDNN, on a CPU; holds the weight in oneDNN's own layout only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bytes = _bytes(weight) + (0 if bias is None else _bytes(bias))
        # Laid out for a decode batch; measured as good for prompts.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_and_sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        x = _pad(x)
        y: Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y[:rows]

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        rows = len(x)
        x, residual = _pad(x), _pad(residual)
        y: Tensor = self._product_and_sum(x, residual, self._weight, self._bias, "add")
        return y[:rows]


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for where ``weight`` [out, in] lies."""
    return PackedLinear(weight, bias) if _packs(weight) else DenseLinear(weight, bias)


class DraftLinear:
    """Either of the two, whichever is quicker: oneDNN's call costs some 10 us, more than the whole
    product of few rows with a small weight. It rounds otherwise for other numbers of rows, which
    the model whose text is served must not do."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._few = DenseLinear(weight, bias)
        self._many = PackedLinear(weight, bias)
        self._most = SMALL_WORK // weight.numel()  # rows
        self.bytes = self._many.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if len(x) <= self._most else self._many(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return (self._few if len(x) <= self._most else self._many).add(x, residual)


def draft_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for a model whose output nobody's text depends on."""
    if _packs(weight) and weight.numel() <= SMALL_WORK:
        return DraftLinear(weight, bias)
    return linear(weight, bias)


def _packs(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and _onednn_multiplies(weight.dtype)


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        # Its kernels for bf16 need AVX-512 or AVX-NE-CONVERT. Without them laying a weight out
        # raises, while torch's own product works on every processor.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _pad(x: Tensor) -> Tensor:
    missing = padded_rows(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
