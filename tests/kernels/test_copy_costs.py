"""The measurement of copies by kernels, as an engine on a GPU makes it, changes no KV."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache.kv_format import Precision, Storage
from engine.slots.copy_costs import measure_copy_costs
from tests.kernels.test_kv_copy import LAYERS, PAGES, POOLS, filled_pool


@pytest.mark.parametrize(("precision", "storage"), [POOLS[-1]])
def test_kernel_copies_are_measured_and_the_pool_stays(
    precision: Precision, storage: Storage, device: torch.device
) -> None:
    pool = filled_pool(precision, storage, torch.bfloat16, 32, device)
    # Values, not bytes: raw values may be encoded again with a smaller scale.
    every = torch.arange(PAGES, device=device)
    before = [pool.layer(layer).gather(every) for layer in range(LAYERS)]
    costs = measure_copy_costs(pool, PAGES, by_kernels=True)
    for layer, expected in enumerate(before):
        assert torch.equal(pool.layer(layer).gather(every), expected)
    assert min(costs.read_raw, costs.write_raw) > 0
    assert (costs.read_fp8 > 0, costs.write_fp8 > 0) == (precision == "fp8",) * 2
