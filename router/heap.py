"""What a router has loaded by the time it serves is left alone by the garbage collector.

Most of it lives as long as the process: code, schemas, a vocabulary. A full collection would go
through it again and again while a large body is decoded, and streams wait meanwhile.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Of a process that is a router and nothing else; to be called when all is loaded."""
    gc.collect()
    gc.freeze()
