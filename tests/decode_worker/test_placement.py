"""Where a prompt is computed."""

from __future__ import annotations

from decode_worker.request import prefill_here


def test_where_a_prompt_is_computed() -> None:
    assert prefill_here(1000, 0, False, 64)
    assert prefill_here(1000, 936, True, 64)
    assert not prefill_here(1000, 935, True, 64)
