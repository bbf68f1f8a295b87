"""KV leaves a prefill worker at the speed of the link, whatever its steps do."""

from __future__ import annotations

import pytest

from tests.engine.slots.simulated_link import SimulatedPrefill

PROMPT, CHUNK = 8192, 2048
CHUNK_S = 0.1  # of an 8B model: an 8k prompt computes in 0.4 s
STEP_S = 0.025  # of a step with other prompts
TAIL_S = 0.010  # beyond the time that the last chunk takes on the link


@pytest.mark.parametrize("link_bytes_s", [1e9, 25e9])
@pytest.mark.parametrize("frame_bytes", [1 << 20, 4 << 20])
def test_tail_is_the_last_chunk_on_the_link(link_bytes_s: float, frame_bytes: int) -> None:
    prefill = SimulatedPrefill(link_bytes_s, window=16)
    nbytes = prefill.offer(1, PROMPT, frame_bytes)
    assert nbytes > 500e6
    chunks = PROMPT // CHUNK
    computed = [CHUNK_S * (chunk + 1) for chunk in range(chunks)]
    for chunk, when in enumerate(computed):
        prefill.compute_at(when, 1, CHUNK * (chunk + 1))
    # The engine goes on with other prompts: nothing of its loop matters to this transfer.
    for step in range(1, 200):
        prefill.clock.at(computed[-1] + step * STEP_S, lambda: None)
    prefill.run()
    # A link that is slower than the computation still carries the chunks before.
    left = max(nbytes / chunks, nbytes - link_bytes_s * (computed[-1] - computed[0]))
    assert prefill.complete[1] - computed[-1] <= left / link_bytes_s + TAIL_S


def test_started_prompts_do_not_delay_the_one_that_is_computed() -> None:
    """40 hand-overs were started and wait for their turn. One computes."""
    prefill = SimulatedPrefill(25e9, window=16)
    for handle in range(2, 42):
        prefill.offer(handle, PROMPT, 4 << 20)
    nbytes = prefill.offer(1, PROMPT, 4 << 20)
    prefill.compute_at(0.1, 1, PROMPT)
    prefill.run()
    assert prefill.complete[1] - 0.1 <= nbytes / 25e9 + TAIL_S


def test_transfers_that_flow_share_the_link() -> None:
    prefill = SimulatedPrefill(25e9, window=16)
    nbytes = [prefill.offer(handle, PROMPT, 4 << 20) for handle in range(4)]
    for handle in range(4):
        prefill.compute_at(0.1, handle, PROMPT)
    prefill.run()
    ends = sorted(prefill.complete.values())
    assert ends[-1] - 0.1 <= sum(nbytes) / 25e9 + TAIL_S
    assert ends[0] - 0.1 >= 0.9 * (ends[-1] - 0.1), "none had to wait for another one"
