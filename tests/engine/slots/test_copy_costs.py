"""Costs of copies are measured for each codec, and the measurement changes no KV."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache.kv_format import KVFormat, Precision, Storage
from engine.kv_cache.kv_pool import make_pool
from engine.slots.copy_costs import measure_copy_costs


@pytest.mark.parametrize(
    ("precision", "storage"), [("exact", "wide"), ("fp8", "wide"), ("fp8", "fp8")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costs_are_measured_and_the_pool_stays(
    precision: Precision, storage: Storage, dtype: torch.dtype
) -> None:
    kv = KVFormat(
        precision=precision,
        storage=storage,
        layers=3,
        kv_heads=2,
        head_dim=16,
        element_bytes=dtype.itemsize,
    )
    pool = make_pool(kv, 5, dtype, torch.device("cpu"))
    slots = torch.arange(5 * 32)
    for layer in range(kv.layers):
        pool.store(layer, slots, torch.randn(len(slots), 2, 2, 16).to(dtype))
    before = [pool.layer(layer).gather(torch.arange(5)) for layer in range(kv.layers)]
    threads = torch.get_num_threads()
    costs = measure_copy_costs(pool, 5, by_kernels=False)
    assert torch.get_num_threads() == threads
    for layer, expected in enumerate(before):
        assert torch.equal(pool.layer(layer).gather(torch.arange(5)), expected)
    assert 0 < costs.read_raw < 1e-5
    assert 0 < costs.write_raw < 1e-5
    assert (costs.read_fp8 > 0, costs.write_fp8 > 0) == (precision == "fp8",) * 2
