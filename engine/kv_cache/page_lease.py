"""Pages that the copy thread writes received KV to, until the step loop takes them back.

    step loop                                copy thread
    PageLease(pages)      --expect-->        with lease.pages() as pages: write one frame, record it
    revoke: waits for the frame that is being written; nothing is written from then on

The scheduler creates a lease when it gives pages to a sequence whose KV comes from another worker,
and revokes it before these pages can belong to any other sequence or enter the prefix cache.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from engine.kv_cache.kv_format import KVFormat, KVPiece


class PageLease:
    """The pages of one receiving or importing sequence, shared by two threads. ``first_block`` is
    the first block that may be written: the earlier ones are cached, and others may read them."""

    def __init__(self, handle: int, pages: Sequence[int], first_block: int) -> None:
        self.handle = handle
        self._pages = list(pages)
        self._first_block = first_block
        self._written: dict[int, int] = {}  # layers x heads of incomplete blocks, by block
        self._complete: set[int] = set()
        self._frames = 0
        self._revoked = False
        self._lock = threading.Lock()

    @property
    def revoked(self) -> bool:
        return self._revoked

    @property
    def frames(self) -> int:
        """The frames that were written so far."""
        return self._frames

    def covers(self, piece: KVPiece) -> bool:
        """Return whether every block of ``piece`` may be written."""
        return self._first_block <= piece.block < piece.block + piece.blocks <= len(self._pages)

    @contextlib.contextmanager
    def pages(self, piece: KVPiece) -> Iterator[Sequence[int] | None]:
        """Give the pages of ``piece`` [blocks] for the duration of a ``with`` block, or None after
        ``revoke``. No copy may go on after the block, on a GPU either."""
        assert self.covers(piece)
        with self._lock:
            if self._revoked:
                yield None
            else:
                yield self._pages[piece.block : piece.block + piece.blocks]

    def record(self, piece: KVPiece, kv: KVFormat) -> None:
        """Count ``piece`` as written; call it in the ``with`` block of ``pages``, once for each
        piece."""
        first = max(piece.head, kv.first_head)
        end = min(piece.head + (piece.heads or kv.model_heads), kv.first_head + kv.kv_heads)
        units = piece.layers * max(0, end - first)
        for block in range(piece.block, piece.block + piece.blocks):
            self._written[block] = self._written.get(block, 0) + units
            if self._written[block] >= kv.layers * kv.kv_heads:
                del self._written[block]
                self._complete.add(block)
        self._frames += 1

    def revoke(self) -> None:
        """Let nothing more be written; wait for a frame that is being written. Idempotent."""
        self._revoked = True  # before the lock, which is not fair: no further frame begins
        with self._lock:
            pass

    def complete_blocks(self) -> int:
        """Return the number of leading blocks that are cached or completely written."""
        with self._lock:
            block = self._first_block
            while block in self._complete:
                block += 1
            return block
