"""Which product a weight gets on a CPU, and that each kind computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.linear import Linear, OneDnnLinear, TorchLinear, make_draft_linear, make_linear

KINDS = [make_linear, make_draft_linear]


@pytest.fixture
def no_bf16_in_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with AVX2 and without AVX-512: oneDNN has no bf16, and its layout raises."""

    def raises(_weight: Tensor, _rows: int) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", raises)


def check(make: Callable[[Tensor, Tensor | None], Linear], dtype: torch.dtype, rows: int) -> None:
    """Compare with the product in double precision, with and without a bias."""
    generator = torch.Generator().manual_seed(3)
    weight, bias, x, residual = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((256, 96), (256,), (rows, 96), (rows, 256))
    )
    # Of sums up to 50 in size; bf16 has 8 bits, and ``add`` may round the product before the sum.
    near = 1e-4 if dtype == torch.float32 else 2.0**-7
    for own in (None, bias):
        product = make(weight, own)
        exact = F.linear(x.double(), weight.double(), None if own is None else own.double())
        torch.testing.assert_close(product(x).double(), exact, atol=10 * near, rtol=near)
        added = product.add(x, residual)
        assert added.dtype == dtype
        torch.testing.assert_close(added.double(), exact + residual, atol=10 * near, rtol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_every_linear_layer_matches_double_precision(
    make: Callable[[Tensor, Tensor | None], Linear], dtype: torch.dtype, rows: int
) -> None:
    check(make, dtype, rows)


@pytest.mark.usefixtures("no_bf16_in_onednn")
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_bf16_falls_back_to_torch_without_onednn_support(
    make: Callable[[Tensor, Tensor | None], Linear], rows: int
) -> None:
    assert isinstance(make(torch.zeros(8, 8, dtype=torch.bfloat16), None), TorchLinear)
    check(make, torch.bfloat16, rows)


def test_fp32_uses_onednn_where_bf16_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert isinstance(make_linear(torch.zeros(8, 8)), OneDnnLinear)
