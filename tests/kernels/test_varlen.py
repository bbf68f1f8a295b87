"""Torch accepts the call of its variable-length attention, which only a GPU can run."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.kernels.attention import AttentionShape
from engine.kernels.paged_rows import PromptRows
from engine.model.fused_layers import runs_varlen, varlen_attention


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_options_fit_the_installed_torch(window: int, kv_heads: int) -> None:
    """Tensors of the device meta have shapes and types, and compute nothing."""
    q = torch.empty(50, 8, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(70, 2, kv_heads, 128, dtype=torch.bfloat16, device="meta")[:, 0]
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    prompts = PromptRows(slice(0, 50), starts, starts, starts.long(), 30, 40)
    out = varlen_attention(q, k, k, prompts, AttentionShape(0.1, 0.0, window))
    assert out.shape == q.shape and out.dtype == q.dtype


def test_what_it_cannot_compute_goes_another_way() -> None:
    with FakeTensorMode():
        half = torch.empty(4, 8, 128, dtype=torch.bfloat16, device="cuda")
        odd = torch.empty(4, 8, 100, dtype=torch.bfloat16, device="cuda")
        wide = torch.empty(4, 8, 128, device="cuda")
    assert runs_varlen(half, softcap=0.0, windows=True)
    assert not runs_varlen(half, softcap=30.0, windows=False)
    assert not runs_varlen(wide, softcap=0.0, windows=False)
    assert not runs_varlen(odd, softcap=0.0, windows=False)
