"""Pauses garbage collection while large packages are imported."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block. Imports create objects that stay, and collections walk all
    of them again and again: a fifth of the time that torch or Ray Serve takes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
