"""The rows of prompt chunks: gathering is bounded, and takes every key once."""

from __future__ import annotations

import pytest
import torch

from engine.batching import paged_batcher
from engine.batching.paged_batcher import pack_prompts
from engine.scheduling.sequence import Phase, Sequence
from tests.engine.conftest import request

CPU = torch.device("cpu")


def sequence(handle: int, tokens: int) -> Sequence:
    made = Sequence(handle, request("r", list(range(tokens))), Phase.PREFILL)
    made.pages = [100 * handle + i for i in range(-(-tokens // 32))]
    return made


@pytest.mark.parametrize("bound", [1, 100, 130, 1000])
def test_chunks_are_gathered_in_groups_of_bounded_size(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_batcher, "MOST_GATHERED_KEYS", bound)
    chunks = [(sequence(1, 70), 0, 70), (sequence(2, 60), 32, 60), (sequence(3, 130), 96, 128)]
    prompts, inputs, _ = pack_prompts(chunks, CPU, first_row=5)
    rows = [row for group in prompts for row in range(group.rows.start, group.rows.stop)]
    assert rows == list(range(5, 5 + 70 + 28 + 32))
    keys = torch.cat([group.key_slots for group in prompts])
    assert len(keys) == 70 + 60 + 128 == sum(int(group.key_starts[-1]) for group in prompts)
    for group in prompts:
        assert len(group.key_slots) <= bound or len(group.starts) == 2
        assert group.most_keys == int(group.key_starts.diff().max())
        assert group.most_rows == int(group.starts.diff().max())
    # The slots of a chunk's own tokens are the last ones of its keys.
    assert inputs.slots[-32:].tolist() == keys[-32:].tolist()
    assert inputs.positions[70:98].tolist() == list(range(32, 60))
