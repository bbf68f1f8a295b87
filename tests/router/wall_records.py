"""Figures of workers as they would be on machines of known ceilings."""

from __future__ import annotations

from typing import Any

from protocol.registry.directory import WorkerUtilisation


def figures(**changes: Any) -> WorkerUtilisation:
    """Of a worker that is busy all the time with steps of no weight."""
    return WorkerUtilisation(
        **{
            **{"seconds": 10.0, "busy": 1.0, "compute": 0.0, "bandwidth": 0.0, "capacity": 0.1},
            **{"network": 0.0, "starved": 0.0, "kv_wait": 0.0, "batch": 1.0, "kv_share": 0.0},
            **{"element_bytes": 2, "kv_shrink": 1.0, "wire_shrink": 1.0, "gpu": True},
            "drafts": True,
            **changes,
        }
    )


def decoding(
    parameters: float, batch: int, kv: float, flops: float, bandwidth: float, step_s: float = 0.0
) -> WorkerUtilisation:
    """A decode step of a dense bf16 model: ``kv`` bytes of each sequence, a machine's FLOP/s and
    bytes/s. ``step_s``: what the step takes, at least the floor."""
    weights, done = 2 * parameters, 2 * parameters * batch
    moved = weights + batch * kv
    seconds = max(step_s, moved / bandwidth, done / flops)
    return figures(
        compute=done / flops / seconds,
        bandwidth=moved / bandwidth / seconds,
        kv_share=batch * kv / moved,
        batch=float(batch),
    )
