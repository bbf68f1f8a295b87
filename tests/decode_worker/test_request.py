"""Whether a decode worker prefills a prompt itself."""

from __future__ import annotations

from decode_worker.request import should_prefill_locally


def test_prompt_is_prefilled_locally_without_a_prefill_worker_or_with_few_tokens_missing() -> None:
    assert should_prefill_locally(1000, 0, False, 64)
    assert should_prefill_locally(1000, 936, True, 64)
    assert not should_prefill_locally(1000, 935, True, 64)
