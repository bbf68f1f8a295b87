"""The part ``tail``: how long KV is waited for after the first token."""

from __future__ import annotations

from bench.kv_link.field import LinkContestant, LinkField
from bench.kv_link.media.memory import GIGABYTE
from bench.kv_link.pairs import LinkRun
from bench.kv_link.product.pool_engine import PACED, STEP_BLOCKS, STEP_S
from bench.kv_link.product.shapes import SHAPES
from bench.kv_link.results import PartResult
from bench.kv_link.simulated_tail import SimulatedTransfer
from bench.lib.report import ResultRow, median
from engine.ipc.settings import CopyCosts
from engine.ipc.shared_memory import ArenaShape
from kvtransfer.codec_choice import choose_frames

BLOCKS = 256
"""A prompt of 8,192 tokens: 1.07 GB of raw KV in 16 steps."""

LINKS = (1e9, 25e9)
"""Bytes per second of the simulated links."""

ROUNDS, QUICK_ROUNDS = 3, 1
BEYOND_S = 0.010
"""The aim: so much more than a link needs that is never idle while there is KV to send."""


def least_tail_s(step_bytes: list[int], link_bytes_s: float) -> float:
    """Return the tail over a link of ``link_bytes_s`` that is never idle while a step's KV is
    there: of the last step alone, if the link keeps up with the steps."""
    free_s = 0.0
    for number, nbytes in enumerate(step_bytes):
        free_s = max(free_s, (number + 1) * STEP_S) + nbytes / link_bytes_s
    return free_s - len(step_bytes) * STEP_S


def measure(field: LinkField, *, quick: bool) -> PartResult:
    """Measure the tail over each carrier of the 8B shape. Raises RuntimeError."""
    ours = [c for c in field.with_engines if c.shape == "8B"]
    runs: dict[LinkContestant, list[LinkRun]] = {contestant: [] for contestant in ours}
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        for contestant, taken in runs.items():
            taken.append(field.run(contestant, 0, PACED, "raw", blocks=BLOCKS))
    result = PartResult([], [])
    for contestant, taken in runs.items():
        tail_s = median([run.seconds for run in taken])
        tail_bytes = median([run.details["tail_bytes"] for run in taken])
        rate = tail_bytes / tail_s / GIGABYTE
        text = f"{tail_bytes / 1e6:.0f} MB at {rate:.2f} GB/s"
        result.rows.append(ResultRow(f"tail: {contestant.name}", 1000 * tail_s, "ms", text))
    for link_bytes_s in LINKS:
        add_simulated(result, link_bytes_s)
    return result


def add_simulated(result: PartResult, link_bytes_s: float) -> None:
    """Add the tail of the 8B shape over a link in simulated time."""
    shape = SHAPES["8B"]
    slot_bytes = ArenaShape().slot_bytes
    frames = choose_frames(shape.kv_format, "raw", CopyCosts(), link_bytes_s, slot_bytes)
    counts = range(STEP_BLOCKS, BLOCKS + 1, STEP_BLOCKS)
    steps = [(STEP_S * (number + 1), blocks) for number, blocks in enumerate(counts)]
    tail_s = SimulatedTransfer(shape, link_bytes_s, frames.frame_bytes, steps).tail_s()
    least_s = least_tail_s([STEP_BLOCKS * shape.block_bytes] * len(steps), link_bytes_s)
    name = f"tail over a link of {link_bytes_s / GIGABYTE:g} GB/s, simulated"
    text = f"the link alone {1000 * least_s:.1f} ms"
    result.rows.append(ResultRow(name, 1000 * tail_s, "ms", text, least_s / tail_s))
    result.add_limit(name, 1000 * tail_s, 1000 * (least_s + BEYOND_S), " ms")
