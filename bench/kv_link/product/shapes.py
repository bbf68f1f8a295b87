"""The shapes of KV that are moved."""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from bench.kv_link.media.memory import LARGEST
from engine.kv_cache.kv_format import Codec, KVFormat


class KVShape(msgspec.Struct, frozen=True):
    """A model's KV in a wide pool on a CPU, with values that every codec preserves."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def kv_format(self) -> KVFormat:
        return KVFormat(
            precision="fp8",
            storage="wide",
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            element_bytes=self.torch_dtype.itemsize,
        )

    @property
    def block_bytes(self) -> int:
        """Raw bytes of one block in all layers."""
        return self.layers * self.kv_format.block_layer_bytes(Codec.RAW)

    @property
    def pages(self) -> int:
        """Pages of the pool at each end: enough for the largest transfer."""
        return -(-LARGEST // self.block_bytes)

    def blocks_for(self, nbytes: int) -> int:
        """Return the number of whole blocks of about ``nbytes`` raw bytes, at least one."""
        return min(self.pages, max(1, round(nbytes / self.block_bytes)))


SHAPES: Final = {
    "8B": KVShape(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),
    "demo": KVShape(layers=6, kv_heads=2, head_dim=64, dtype="float32"),
}
"""KV of Llama 3 8B, and of the demo model as an engine on a CPU stores it."""
