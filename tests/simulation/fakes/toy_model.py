"""A model whose next token is a checksum of the KV of its whole context, and its oracle.

    stamp of token t at position p in layer l   K = (t, p), V = (l, hash of all tokens up to p)
    next token                                  CRC of the stamps of the context, read from the pool

So a page that lacks a frame, or holds KV of another text, changes everything that follows. The
stamp needs the hash before it, which is read from the pool, too: wrong KV spreads as in a model.
``ToyEngine`` is the real engine, and ``ToyStepper`` the real stepper, without torch's passes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.execution.engine import Engine, EngineConfig
from engine.execution.stepper import Stepper, TokenOut
from engine.execution.verifier import DrawnTokens
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.kv_format import KVFormat
from engine.kv_cache.kv_pool import make_pool
from engine.scheduling.deadlines import DeadlineQueue
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_policy import StepBounds, StepPlan, StepPlanner, StepPolicy
from engine.scheduling.step_time import StepTimeModel, StepTimer
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Finish

VOCAB = 97
EOS = 0
LAYERS = 2
KV = KVFormat(
    precision="exact", storage="wide", layers=LAYERS, kv_heads=1, head_dim=2, element_bytes=4
)
_HASH = 1 << 14  # exact in a float, and no larger than KV may be (MAX_KV_VALUE)


_STAMPS = struct.Struct(f"<{4 * LAYERS}f")  # of one token, in all layers


def _mix(before: int, token: int) -> int:
    return (before * 31 + token * 7919 + 1) % _HASH


def _draw(checksum: int) -> int:
    return (checksum ^ (checksum >> 16)) % VOCAB


def oracle(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool) -> list[int]:
    """Return the whole output for ``prompt``."""
    mixed = checksum = 0
    out: list[int] = []
    tokens = list(prompt)
    position = 0
    while len(out) < max_tokens:
        for token in tokens[position:]:
            mixed = _mix(mixed, token)
            stamps = _STAMPS.pack(token, position, 0, mixed, token, position, 1, mixed)
            checksum = zlib.crc32(stamps, checksum)
            position += 1
        tokens.append(_draw(checksum))
        out.append(tokens[-1])
        if out[-1] == EOS and not ignore_eos:
            break
    return out


class ToyStepper(Stepper):
    """Computes steps with numpy. ``elapse`` lets the clock of the engine process go on."""

    def __init__(self, pool: Any, scheduler: Scheduler, elapse: Callable[[StepPlan], None]) -> None:
        self._scheduler = scheduler
        self._eos = frozenset((EOS,))
        self._refused = []
        self._ahead = None
        self.steps_ahead = 0
        self.speculator = None
        self._elapse = elapse
        shape = LAYERS, -1, BLOCK_TOKENS, 4
        self._kv = pool.tensor.numpy().reshape(shape)  # [layers, pages, tokens, stamp]

    def run(self, plan: StepPlan) -> list[TokenOut]:
        drawing = [*plan.decode, *(s for s, n in plan.chunks if s.remaining == n)]
        for sequence in plan.decode:
            self._store(sequence, sequence.computed, sequence.computed + 1)
        for sequence, count in plan.chunks:
            self._store(sequence, sequence.computed, sequence.computed + count)
        ends = [len(s.tokens) for s in drawing]
        drawn = [
            DrawnTokens([self._next(s, n)], [None]) for s, n in zip(drawing, ends, strict=True)
        ]
        self._elapse(plan)
        for sequence, count in plan.chunks:
            sequence.computed += count
            sequence.commit(self._scheduler.manager)
        return [t for s, d in zip(drawing, drawn, strict=True) for t in self._advance(s, d)]

    def _store(self, sequence: Any, start: int, end: int) -> None:
        mixed = 0
        if start:
            page, place = sequence.pages[(start - 1) // BLOCK_TOKENS], (start - 1) % BLOCK_TOKENS
            mixed = int(self._kv[0, page, place, 3])
        rows = []
        for index, token in enumerate(sequence.tokens[start:end], start):
            mixed = _mix(mixed, token)
            rows.append((token, index, 0, mixed))
        stamps = np.array(rows, np.float32)  # [tokens, stamp]
        at = np.arange(start, end)
        pages = np.array(sequence.pages)[at // BLOCK_TOKENS]
        for layer in range(LAYERS):
            stamps[:, 2] = layer
            self._kv[layer, pages, at % BLOCK_TOKENS] = stamps

    def _next(self, sequence: Any, tokens: int) -> int:
        pages = sequence.pages[: -(-tokens // BLOCK_TOKENS)]
        context = self._kv[:, pages].reshape(LAYERS, -1, 4)[:, :tokens]  # [layers, tokens, stamp]
        return _draw(zlib.crc32(np.ascontiguousarray(context.transpose(1, 0, 2)).tobytes()))


class ToyEngine(Engine):
    """The engine, with the toy model."""

    def __init__(
        self,
        config: EngineConfig,
        policy: StepPolicy,
        clock: Callable[[], float],
        elapse: Callable[[StepPlan], None],
    ) -> None:
        cpu = torch.device("cpu")
        names = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(EOS,))
        self.model: Any = SimpleNamespace(config=names, device=cpu, dtype=torch.float32)
        self.config = config
        self.format = KV
        self.pool = make_pool(KV, config.pages, torch.float32, cpu)
        self.manager = BlockManager(config.pages)
        self.step_time = StepTimeModel()  # it never observes a step: routers use their prior
        self._timer = StepTimer(self.step_time, clock)
        self._clock = clock
        bounds = StepBounds.from_settings(config)
        planner = StepPlanner(policy, config.prefill_chunk, bounds, self.step_time)
        self.scheduler = Scheduler(self.manager, config.max_batch, planner)
        self._deadlines = DeadlineQueue(self.scheduler.sequences)
        self.speculator = None
        self._stepper = ToyStepper(self.pool, self.scheduler, elapse)


__all__ = ["EOS", "KV", "LAYERS", "VOCAB", "Finish", "ToyEngine", "oracle"]
