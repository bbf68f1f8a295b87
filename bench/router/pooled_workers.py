"""Simulated workers of a pool that several routers share; ``bench.router.many_routers`` runs them.

A worker computes prompts in order and decodes a batch whose sequences share the steps. It keeps a
prefix cache. Everything takes the time that ``STEP`` says, on a virtual clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster.simulator.devices.clock import SimulatedClock
from engine.process.untaken_prompts import LatestPrompts
from protocol.block_keys import BLOCK_TOKENS
from protocol.performance.step_model import StepModel
from protocol.registry.directory import ModelInfo, WorkerRecord
from protocol.roles import Role
from protocol.wire import wire_pb2 as pb
from router.placement.cost import Placement

STEP = StepModel(0.01, 1e-4, 2e-8, 3e-5, 1e-10)
CHUNK = 2048
ROWS = 64
KV_TOKENS = 300_000
KV_BYTES = 64 * 1024
LINK_BYTES_S = 5e9
BESIDE = (2.0, 1.5)  # a prompt takes so much longer beside decoding, and steps beside a prompt
MODEL = ModelInfo(
    id="m",
    fingerprint="f",
    precision="fp8",
    max_model_len=1 << 17,
    vocab_size=1 << 16,
    kv_bytes_per_token=KV_BYTES,
)


class PoolTurn:
    """One request of a conversation. ``keys``: blocks of the prompt and of its answer."""

    def __init__(self, keys: Sequence[bytes], tokens: int, output: int, session: bytes) -> None:
        self.keys, self.tokens, self.output, self.session = keys, tokens, output, session
        self.cached = 0  # prompt tokens that were, when it was computed
        self.arrived = self.submitted = self.first_s = self.end_s = 0.0
        self.is_refused = False
        self.digest = 0  # of its request's id
        self.on_end: Callable[[], None] = lambda: None


class PoolLinks(NamedTuple):
    """What a worker calls in its pool."""

    clock: SimulatedClock
    cached_at: Callable[[str, Sequence[bytes]], int]  # blocks of a prefix that another worker has
    on_cache: Callable[[str, list[bytes], list[bytes]], None]  # stored and evicted blocks
    on_load: Callable[[PooledWorker], None]  # the load has changed


class _Prompt(NamedTuple):
    turn: PoolTurn
    chosen: Placement
    then: Callable[[], None]

    @property
    def expected_tokens(self) -> int:
        """Return the tokens that it computes: as the router expects, until it is begun."""
        return self.turn.tokens - (self.turn.cached or self.chosen.p.cached)


class PooledWorker:
    """One worker of either role. ``SharedPool`` creates it."""

    def __init__(self, name: str, role: Role, links: PoolLinks) -> None:
        self.name, self.role = name, role
        self._links, self._clock = links, links.clock
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._prompts: deque[_Prompt] = deque()
        self._latest = LatestPrompts(lambda: links.clock.now)
        self._is_computing = False
        self._requests = self._promised = 0  # submitted and not ended; tokens that they need
        self._waiting: deque[tuple[PoolTurn, Callable[[], None]]] = deque()  # for a row
        self._ends: list[tuple[float, int, PoolTurn, Callable[[], None]]] = []  # by steps
        self._steps = self._settled_at = self._kv = 0.0
        self._plans = 0

    # ---- prefix cache -----------------------------------------------------------------------

    def cached_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks at the beginning of ``keys`` are cached."""
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def _store(self, keys: Sequence[bytes]) -> None:
        new = [key for key in keys if key not in self._blocks]
        self._blocks.update(dict.fromkeys(new))
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        extra = max(0, len(self._blocks) - KV_TOKENS // BLOCK_TOKENS)
        self._links.on_cache(self.name, new, [self._blocks.popitem(False)[0] for _ in range(extra)])

    # ---- prompts ----------------------------------------------------------------------------

    def compute(self, turn: PoolTurn, chosen: Placement, then: Callable[[], None]) -> None:
        """Compute the prompt after those that are here, and call ``then``."""
        self._prompts.append(_Prompt(turn, chosen, then))
        self._latest.add(turn.digest)
        self._links.on_load(self)
        self._next_prompt()

    def _next_prompt(self) -> None:
        if self._is_computing or not self._prompts:
            return
        self._is_computing = True
        turn, chosen, _ = self._prompts[0]
        held, fetch_s, fetch = self.cached_blocks(turn.keys), 0.0, chosen.p.fetch
        if fetch is not None and (found := self._links.cached_at(fetch.source, turn.keys)) > held:
            fetch_s = (found - held) * BLOCK_TOKENS * KV_BYTES / LINK_BYTES_S
            held = found
        turn.cached = min(held, (turn.tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        seconds = STEP.prefill_s(turn.cached, turn.tokens - turn.cached, CHUNK)
        seconds *= BESIDE[0] if self._ends else 1.0
        self._clock.at(self._clock.now + fetch_s + seconds, self._on_computed)

    def _on_computed(self) -> None:
        turn, _, then = self._prompts.popleft()
        self._is_computing = False
        self._store(turn.keys[: turn.tokens // BLOCK_TOKENS])
        self._links.on_load(self)
        then()
        self._next_prompt()

    # ---- decoding ---------------------------------------------------------------------------

    def promise(self, turn: PoolTurn) -> None:
        """Take a request: its KV will come."""
        self._requests += 1
        self._promised += turn.tokens + turn.output
        self._links.on_load(self)

    def decode(self, turn: PoolTurn, then: Callable[[], None]) -> None:
        """Decode all tokens but the first as soon as there is a row, and call ``then``."""
        self._waiting.append((turn, then))
        self._settle()
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._ends) < ROWS:
            turn, then = self._waiting.popleft()
            self._kv += turn.tokens + turn.output / 2
            self._plans += 1
            heapq.heappush(self._ends, (self._steps + turn.output - 1, self._plans, turn, then))
        self._plans += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._steps)
            self._clock.at(self._clock.now + left * self._step_s(), self._on_end, self._plans)

    def _step_s(self) -> float:
        beside = BESIDE[1] if self._is_computing else 1.0
        return beside * STEP.decode_s(len(self._ends), self._kv)

    def _settle(self) -> None:
        if self._ends:
            self._steps += (self._clock.now - self._settled_at) / self._step_s()
        self._settled_at = self._clock.now

    def _on_end(self, plan: int) -> None:
        if plan != self._plans:
            return  # the batch has changed since
        self._settle()
        _, _, turn, then = heapq.heappop(self._ends)
        self._kv -= turn.tokens + turn.output / 2
        self._requests -= 1
        self._promised -= turn.tokens + turn.output
        self._store(turn.keys)
        self._links.on_load(self)
        then()
        self._admit()

    # ---- load -------------------------------------------------------------------------------

    def load(self) -> pb.Load:
        """Return what the worker tells routers."""
        return pb.Load(
            running=len(self._ends),
            waiting=self._requests - len(self._ends),
            queued_tokens=sum(prompt.expected_tokens for prompt in self._prompts),
            queued_prompts=len(self._prompts),
            kv_tokens_free=max(0, KV_TOKENS - self._promised),
            kv_tokens_total=KV_TOKENS,
            latest_prompts=self._latest.digests(),
            names_prompts=True,
        )

    def record(self) -> WorkerRecord:
        """Return what the worker writes to the directory."""
        load = self.load()
        return WorkerRecord(
            instance=self.name,
            role=self.role,
            endpoint="127.0.0.1:1",
            kv_endpoint="127.0.0.1:1",
            model=MODEL,
            pid=1,
            engine_pid=2,
            queued_tokens=load.queued_tokens,
            queued_prompts=load.queued_prompts,
            step_model=STEP[:5],
            max_batch=ROWS,
            prefill_chunk=CHUNK,
        )
