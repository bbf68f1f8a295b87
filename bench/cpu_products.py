"""Products of few rows on a CPU: oneDNN's own layout of a weight, and torch's product.

    python -m bench.cpu_products

One thread, fp32, the largest weight of a 100 M model's layers, as many of them as a cache does not
hold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.lib.report import ResultRow, finish
from engine.model.linear import Linear, OneDnnLinear, TorchLinear

ROWS = (1, 8, 32, 128)
LAYERS, OUT, IN = 12, 5120, 768


def best_s(layers: Sequence[Linear], x: Tensor, times: int = 7) -> float:
    """Return the shortest of several times of all products of ``x`` [rows, in]."""
    found = []
    for _ in range(times + 1):  # the first one makes the products
        began = time.perf_counter()
        for layer in layers:
            layer(x)
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        weights = [torch.randn(OUT, IN) for _ in range(LAYERS)]
        packed = [OneDnnLinear(w, None) for w in weights]
        dense = [TorchLinear(w, None) for w in weights]
        for count in ROWS:
            x = torch.randn(count, IN)
            ours, torch_s = best_s(packed, x), best_s(dense, x)
            work = 2 * count * OUT * IN * LAYERS / 1e9
            against = f"torch {work / torch_s:.0f} GFLOP/s"
            row = ResultRow(f"{count} rows", work / ours, "GFLOP/s", against, torch_s / ours)
            rows.append(row)
    finish("cpu_products", rows)


if __name__ == "__main__":
    main()
