"""The paged KV pool: one tensor, allocated once.

    pool  [layers, pages, page_tokens, 2 (K, V), kv_heads, head_dim]

A page holds one block of the prefix cache (BLOCK_TOKENS tokens). Token ``t`` of page ``p`` is slot
``p * page_tokens + t`` in every layer. K and V of a token lie side by side, as the projection
leaves them, so that a step writes each layer's KV in one operation and gathers a page in one copy.
Who may use which page is the block manager's business.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.pieces import Piece
from protocol.blocks import BLOCK_TOKENS


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU the system hands out their memory when a page is first written: a pool as
    large as the machine allows costs what is used of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KVPool:
    """Storage of KV by page. Frees nothing: pages are only overwritten."""

    def __init__(
        self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages = pages
        shape = (config.layers, pages, BLOCK_TOKENS, 2, config.kv_heads, config.head_dim)
        self.tensor = _zeros(shape, dtype, device)
        # Per layer: [pages * page_tokens, 2 * kv_heads * head_dim]
        self.by_slot = self.tensor.view(config.layers, pages * BLOCK_TOKENS, -1).unbind()
        # Per layer: [pages, page_tokens, 2, kv_heads, head_dim]
        self.by_page = self.tensor.unbind()

    @property
    def page_layer_bytes(self) -> int:
        """Bytes of one page (K and V) in one layer."""
        page = self.tensor[0, 0]
        return page.numel() * page.element_size()

    def read(self, piece: Piece, pages: Sequence[int], out: Tensor) -> int:
        """Copy ``piece`` into ``out`` (uint8, long enough); returns the bytes written.

        ``pages`` are the pages of the blocks ``piece.blocks``. The layout on the wire is
        [layers, blocks, page_tokens, 2, kv_heads, head_dim].
        """
        source = self.tensor[piece.layer : piece.layer + piece.layers]
        index = torch.tensor(pages, device=source.device)
        shape = (piece.layers, len(pages), *source.shape[2:])
        count = piece.layers * len(pages) * self.page_layer_bytes
        target = out[:count].view(self.tensor.dtype).view(shape)
        if source.device.type == "cpu":
            torch.index_select(source, 1, index, out=target)
        else:
            target.copy_(source.index_select(1, index))
        return count

    def write(self, piece: Piece, pages: Sequence[int], data: Tensor) -> None:
        """Copy ``data`` (uint8, in the layout of ``read``) into ``pages``."""
        target = self.tensor[piece.layer : piece.layer + piece.layers]
        shape = (piece.layers, len(pages), *target.shape[2:])
        source = data.view(self.tensor.dtype).view(shape).to(target.device)
        target.index_copy_(1, torch.tensor(pages, device=target.device), source)
