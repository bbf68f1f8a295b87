"""Products of a model on a CPU, made before a request needs them (engine/linear.py)."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.model import Model
from engine.rows import row_counts

WARM_S = 1.0
"""Most that it may take; what is not ready is made when needed."""


def warm_products(
    model: Model,
    most_rows: int,
    progress: Callable[[float], None] = lambda _: None,
    most_s: float = WARM_S,
) -> None:
    """Make the products of all numbers of rows, the smallest first, as far as ``most_s`` goes."""
    began = time.perf_counter()
    for rows in row_counts(most_rows):
        if (elapsed := time.perf_counter() - began) > most_s:
            break
        progress(elapsed / most_s)
        model.warm(rows)
