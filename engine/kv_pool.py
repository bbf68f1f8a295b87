"""The paged KV pool: one tensor, allocated once.

    pool  [layers, 2 (K, V), pages, page_tokens, kv_heads, head_dim]

A page holds one block of the prefix cache (BLOCK_TOKENS tokens). Token ``t`` of page ``p`` is slot
``p * page_tokens + t`` in every layer. Who may use which page is the block manager's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.pieces import Piece
from protocol.blocks import BLOCK_TOKENS


class KVPool:
    """Storage of KV by page. Frees nothing: pages are only overwritten."""

    def __init__(
        self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages = pages
        shape = (config.layers, 2, pages, BLOCK_TOKENS, config.kv_heads, config.head_dim)
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        # Per layer, K and V by slot: [pages * page_tokens, kv_heads * head_dim]
        slots = self.tensor.view(config.layers, 2, pages * BLOCK_TOKENS, -1)
        self.by_slot = [(slots[i, 0], slots[i, 1]) for i in range(config.layers)]
        # Per layer, K and V by page: [pages, page_tokens, kv_heads, head_dim]
        self.by_page = [(self.tensor[i, 0], self.tensor[i, 1]) for i in range(config.layers)]

    @property
    def page_layer_bytes(self) -> int:
        """Bytes of one page (K and V) in one layer."""
        page = self.tensor[0, :, 0]
        return page.numel() * page.element_size()

    def read(self, piece: Piece, pages: Sequence[int], out: Tensor) -> int:
        """Copy ``piece`` into ``out`` (uint8, long enough); returns the bytes written.

        ``pages`` are the pages of the blocks ``piece.blocks``. The layout on the wire is
        [layers, 2, blocks, page_tokens, kv_heads, head_dim].
        """
        source = self.tensor[piece.layer : piece.layer + piece.layers]
        index = torch.tensor(pages, device=source.device)
        shape = (piece.layers, 2, len(pages), *source.shape[3:])
        count = piece.layers * len(pages) * self.page_layer_bytes
        target = out[:count].view(self.tensor.dtype).view(shape)
        if source.device.type == "cpu":
            torch.index_select(source, 2, index, out=target)
        else:
            target.copy_(source.index_select(2, index))
        return count

    def write(self, piece: Piece, pages: Sequence[int], data: Tensor) -> None:
        """Copy ``data`` (uint8, in the layout of ``read``) into ``pages``."""
        target = self.tensor[piece.layer : piece.layer + piece.layers]
        shape = (piece.layers, 2, len(pages), *target.shape[3:])
        source = data.view(self.tensor.dtype).view(shape).to(target.device)
        target.index_copy_(2, torch.tensor(pages, device=target.device), source)
