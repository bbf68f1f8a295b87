"""Windows of time in rules, as PromQL writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Windows:
    """``scale``: what every window and every ``for`` is multiplied by. 1 but in tests, which let
    the same expressions fire in seconds; names of rules keep the window that they have at 1."""

    scale: float = 1.0

    def __call__(self, nominal: str) -> str:
        """``5m`` as it is to be written: at least a millisecond, which is Prometheus' unit."""
        if self.scale == 1.0:
            return nominal
        return f"{max(1, round(seconds(nominal) * self.scale * 1000))}ms"


def seconds(duration: str) -> float:
    """Of a duration with one unit, like ``90s``."""
    match = re.fullmatch(r"(\d+)([smhd])", duration)
    assert match is not None, duration
    return int(match[1]) * float(_SECONDS[match[2]])
