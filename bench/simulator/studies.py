"""The workloads on which pools are compared in the simulator, and the workers that serve them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

MACHINES: dict[str, Any] = {
    "prefill": {
        "step": [0.0217, 1.5e-4, 4.9e-8, 2.67e-4, 5.3e-9],
        "chunk": 2048,
        "max_batch": 256,
        "kv_tokens": 386_000,
        "kv_bytes": 163_840,
        "link_gb_per_s": 50,
    }
}
SPREAD_S = 300
"""Seconds within which the copies of a trace begin, because users of a large service are not in
step with each other."""
DAY_S = 3 * 3600.0
"""The declared day is played eight times as quick as a real one, which is harder to follow."""


class Study(NamedTuple):
    """One workload."""

    name: str
    scenario: dict[str, Any]


def of_trace(name: str, trace: Path, copies: float, ttft_ms: float) -> Study:
    """Define the requests of a trace."""
    return Study(
        name,
        {
            "machines": MACHINES,
            "objectives": {"ttft_ms": ttft_ms, "tpot_ms": 100},
            "traffic": {
                "trace": str(trace),
                "copies": max(1, round(copies)),
                "spread_s": SPREAD_S,
            },
        },
    )


def azure(traces: Path, gpus: float) -> Study:
    """Define an hour of conversations with 1155 prompt and 211 output tokens on average."""
    return of_trace("azure", traces / "azure_conv.csv", gpus / 3.6, 4000)


def day(_: Path, gpus: float) -> Study:
    """Define a day of long prompts with a peak at noon and long answers with a peak in the evening,
    each at 20% of its peak by night."""
    rate = gpus / 64
    sine = {"amplitude": 0.67, "period_s": DAY_S}
    return Study(
        "day",
        {
            "seconds": DAY_S,
            "machines": MACHINES,
            "objectives": {"ttft_ms": 8000, "tpot_ms": 100},
            "traffic": {
                "mixes": [
                    {
                        "rate": 7 * rate,
                        "sine": sine,
                        "prompt": "lognormal:5000,0.6,20000",
                        "output": "lognormal:200,0.6,1500",
                    },
                    {
                        "rate": 9.5 * rate,
                        "sine": {**sine, "phase": 0.25},
                        "prompt": "lognormal:800,0.6,8000",
                        "output": "lognormal:4000,0.6,16000",
                    },
                ]
            },
        },
    )


def mooncake(traces: Path, gpus: float) -> Study:
    """Define an hour of long conversations with shared prefixes and a nearly constant rate."""
    return of_trace("mooncake", traces / "mooncake_conversation.jsonl", gpus / 15.0, 30_000)


STUDIES = {"azure": azure, "day": day, "mooncake": mooncake}


class QuickScale(NamedTuple):
    """Size of a study with ``--quick``."""

    gpus: float
    seconds: float | None  # None: the whole study


QUICK = {
    "azure": QuickScale(8.0, 2700.0),
    "day": QuickScale(10.0, 0.75 * DAY_S),
    "mooncake": QuickScale(15.0, None),
}


def quick_study(name: str, traces: Path) -> Study:
    gpus, seconds = QUICK[name]
    study = STUDIES[name](traces, gpus)
    if seconds is None:
        return study
    return study._replace(scenario={**study.scenario, "seconds": seconds})
