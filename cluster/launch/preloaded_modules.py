"""Imports Ray Serve in the processes that Ray starts in advance (``ray_runtime.start_ray``).

All of them need it: Serve's controller and every replica. So they load it beside one another while
the supervisor starts Serve.
"""

from __future__ import annotations

from protocol.garbage_collection import without_garbage_collection

with without_garbage_collection():
    from ray import serve

__all__ = ["serve"]
