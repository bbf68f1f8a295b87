"""Numbers of rows that products with a weight are made for (engine/linear.py). Torch-free."""

from __future__ import annotations


def padded_rows(rows: int) -> int:
    """The least of 1..8, 12, 16, ... 64, 96, 128, ... that is not below ``rows``."""
    step = 1 if rows <= 8 else 4 if rows <= 32 else 8 if rows <= 64 else 32
    return -(-rows // step) * step


def row_counts(most: int) -> list[int]:
    """Every number of rows that ``padded_rows`` gives, up to the one for ``most``."""
    return sorted({padded_rows(rows) for rows in range(1, most + 1)})
