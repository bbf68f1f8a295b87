"""Warm-up of a loaded engine: its first steps, which are slow, and steps to measure.

The step-time model learns from every step. It must also know what the largest steps take before any
has come: routers and the autoscaler decide by it how much work a worker can bear. So the largest
ones are measured here, and the model never forgets them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from engine.execution.engine import Engine
from engine.execution.speculation_loading import start_controller
from engine.ipc.counters import SpeculationStatus
from engine.scheduling.step_time import MIN_OBSERVATIONS
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

OnProgress = Callable[[str, float], None]
"""Called with (what is being done, fraction done). The front ends an engine that is silent for long
while it loads (``LOADING_SILENCE_S``), so a slow stage calls it again and again."""

PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=1.0, top_p=0.9)
"""So that all that a step may need has been run once."""

REPEATS = 3
"""Measurements of each of the largest steps."""


def warm_up(engine: Engine, progress: OnProgress = lambda _what, _done: None) -> float:
    """Run the largest steps and some others, and return the seconds of the longest. First steps are
    slower than later ones, so the step-time model learns from the second round only."""

    def before_step() -> None:
        progress("warming up", 0.0)

    chunk = engine.config.prefill_chunk
    first_s = _run_prompts(engine, [chunk], 2, before_step)
    engine.step_time.reset()
    _run_prompts(engine, [chunk, chunk // 4], MIN_OBSERVATIONS, before_step)
    longest = _measure_largest_steps(engine, before_step)
    engine.manager.evict_unused()  # no request will ever use these blocks
    return max(first_s, longest)


def measure_drafts(engine: Engine, progress: OnProgress) -> SpeculationStatus:
    """Measure what drafts cost, let a controller choose their lengths, and return the status."""
    assert engine.speculator is not None

    def before_step() -> None:
        progress("measuring the cost of drafts", 0.0)

    chunk = engine.config.prefill_chunk
    _run_prompts(engine, [chunk // 2, chunk // 4], MIN_OBSERVATIONS, before_step)
    before_step()
    engine.manager.evict_unused()
    start_controller(engine)
    return engine.speculator.status()


def _run_prompts(
    engine: Engine,
    lengths: Iterable[int],
    tokens: int,
    before_step: Callable[[], None],
    sampling: SamplingParams = FILTERED,
) -> float:
    """Run prompts of these lengths with ``tokens`` output tokens each, shortened to what the engine
    can hold, and return the seconds of the longest step."""
    limit = min(engine.config.max_model_len, engine.manager.pages * BLOCK_TOKENS)
    tokens = min(tokens, limit // 2)
    for place, length in enumerate(lengths):
        request = _request(engine, max(1, min(length, limit - tokens)), tokens, sampling)
        engine.generate(-1 - place, request)  # unlike the handles of requests
    return _run_all(engine, before_step)


def _measure_largest_steps(engine: Engine, before_step: Callable[[], None]) -> float:
    """Measure a step of the most prompt tokens, one of the most sequences over short contexts, and
    one of the most sequences over as much KV as the pool holds. Return the seconds of the longest.
    Drafts pause."""
    engine.take_role(engine.scheduler.planner.policy, drafts=False)
    longest = 0.0
    with engine.step_time.remembered():
        chunk = engine.config.prefill_chunk
        for _ in range(REPEATS):
            longest = max(longest, _run_prompts(engine, [chunk], 1, before_step, PLAIN))
    rows = min(engine.config.max_batch, engine.manager.pages)
    whole = min(engine.config.max_model_len, engine.manager.pages // rows * BLOCK_TOKENS)
    for tokens in (min(BLOCK_TOKENS, whole), whole):
        context = tokens - REPEATS - 1
        if context > 0:
            longest = max(longest, _measure_decode(engine, rows, context, before_step))
    if engine.speculator is not None:
        engine.speculate(engine.speculator)
    return longest


def _measure_decode(
    engine: Engine, rows: int, context: int, before_step: Callable[[], None]
) -> float:
    """Measure steps that decode ``rows`` sequences over a context of this many tokens each, and
    return the seconds of the longest. Whatever KV lies in the pool takes as long to read, and as
    long to draw from, because no filter looks at what it leads to."""
    request = _request(engine, context, REPEATS + 1, PLAIN)
    decode_over_pool(engine, request, range(-rows, 0))
    with engine.step_time.remembered():
        longest = _run_all(engine, before_step)
    engine.scheduler.take_joined()
    engine.manager.evict_unused()
    return longest


def decode_over_pool(engine: Engine, request: Request, handles: Sequence[int]) -> None:
    """Let sequences with the context of ``request`` decode from the next step on, over the KV that
    lies in the pool, as if it had come from another worker. The engine must be idle. Raises
    InvalidRequest, or AssertionError where not all fit into the pool together."""
    for handle in handles:
        own = msgspec.structs.replace(request, cache_root=os.urandom(16))  # shares no page
        engine.receive(handle, own)
        engine.reserve(handle)
    engine.plan()  # gives them their pages
    reserved = len(engine.scheduler.take_reserved())
    assert reserved == len(handles), f"{reserved} of {len(handles)} sequences fit into the pool"
    for place, handle in enumerate(handles):
        engine.join(handle, place % engine.model.config.vocab_size)


def _run_all(engine: Engine, before_step: Callable[[], None]) -> float:
    """Run steps until all sequences have ended, and return the seconds of the longest one."""
    longest = 0.0
    while plan := engine.plan():
        before_step()
        began = time.perf_counter()
        engine.run(plan)
        longest = max(longest, time.perf_counter() - began)
    engine.scheduler.take_started()
    return longest


def _request(engine: Engine, length: int, tokens: int, sampling: SamplingParams) -> Request:
    sampling = msgspec.structs.replace(sampling, max_tokens=tokens, ignore_eos=True)
    vocab_size = engine.model.config.vocab_size
    prompt = tuple(i % vocab_size for i in range(length))
    # A random cache root, so that no request ever matches these blocks.
    return Request(id="warm-up", prompt=prompt, sampling=sampling, cache_root=os.urandom(16))
