"""Pauses garbage collection, for work whose objects stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block. Where many objects are created that stay, collections walk
    all of them again and again: a fifth of the time in which torch or Ray Serve is imported."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
