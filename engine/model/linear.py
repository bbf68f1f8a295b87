"""Linear layers: rows times a weight, plus a bias where there is one.

On a CPU the weight is reordered for oneDNN, which then multiplies few rows two to three times
faster than torch's own product on some processors (docs/benchmarks.md). Its kernels are generated
for each number of rows, a few milliseconds each, so the rows are padded to one of few numbers
(``padded_rows``). Where oneDNN does not support the weight's type, torch's own product is used.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_config.config import padded_rows

MAX_TORCH_WORK = 400_000
"""Rows times elements of a weight up to which torch's own product is faster (fp32, measured from 24
to 390 thousand elements)."""


class Linear(Protocol):
    """One weight [out, in] on its device; ``bytes`` is its size with the bias."""

    bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in]."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``residual`` [T, out] plus the product for x [T, in], as a new tensor."""


class TorchLinear:
    """A weight [out, in] multiplied with torch's own product, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [T, out], as ``Linear.add``."""
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.weight.t())


class OneDnnLinear:
    """A weight [out, in] multiplied by oneDNN on a CPU; it is held in oneDNN's own layout only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        # The layout is for a decode batch; prompts were measured to be as fast with it.
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
        """Return [T, out], as ``Linear.add``."""
        rows = len(x)
        x, residual = _pad(x), _pad(residual)
        y: Tensor = self._product_and_sum(x, residual, self._weight, self._bias, "add")
        return y[:rows]


class DraftLinear:
    """Torch's product for few rows, oneDNN's for many: a call of oneDNN costs some 10 us, more than
    the whole product of few rows with a small weight. The two round differently, which a target
    model must not do when the number of rows changes."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._few = TorchLinear(weight, bias)
        self._many = OneDnnLinear(weight, bias)
        self._most = MAX_TORCH_WORK // weight.numel()  # rows
        self.bytes = self._many.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if len(x) <= self._most else self._many(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [T, out], as ``Linear.add``."""
        return (self._few if len(x) <= self._most else self._many).add(x, residual)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest layer for the device and type of ``weight`` [out, in]; bias: [out]."""
    return OneDnnLinear(weight, bias) if _onednn_supports(weight) else TorchLinear(weight, bias)


def make_draft_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest layer for a draft model, on whose rounding no text depends; weight: [out,
    in], bias: [out]."""
    if _onednn_supports(weight) and weight.numel() <= MAX_TORCH_WORK:
        return DraftLinear(weight, bias)
    return make_linear(weight, bias)


def _onednn_supports(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        # oneDNN's bf16 kernels need AVX-512 or AVX-NE-CONVERT. Without them, reordering a weight
        # raises, while torch's own product works on every processor.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _pad(x: Tensor) -> Tensor:
    missing = padded_rows(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight: [size]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        # torch's own norm takes up to 16 times as long as these steps on a CPU.
        self._in_steps = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., size] normalized, as a new tensor of the same shape."""
        if not self._in_steps:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        return (x * scale).mul_(self.weight)
