"""What errors tell clients of the time after which to send again."""

from __future__ import annotations

import math

import pytest

from router.common.errors import overloaded


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        *[(-1.0, "1"), (0.2, "1"), (1.2, "2"), (60.0, "60"), (1e9, "60")],
        *[(math.inf, "60"), (math.nan, "60"), (-math.inf, "1")],
    ],
)
def test_any_prediction_gives_a_time(seconds: float, told: str) -> None:
    assert overloaded("x", seconds).headers == {"retry-after": told}
