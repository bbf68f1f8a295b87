"""Small scenarios: a step of 10 ms, 1 ms a prompt token, no growth with KV unless wanted."""

from __future__ import annotations

from typing import Any

from cluster.simulator.scenario import Scenario, parse_scenario

MACHINE: dict[str, Any] = {
    "step": [0.01, 0.0, 0.0, 0.001, 0.0],
    "chunk": 100_000,
    "max_batch": 256,
    "kv_tokens": 1_000_000,
    "kv_bytes": 1000,
}
NO_DEADLINE: dict[str, Any] = {"routing": {"admission_ttft_ms": 1e9}}
"""Requests wait for their turn however long it takes."""
PATH_S = 0.004


def mix(
    rate: float | None, prompt: object = 100, output: object = 20, **rest: Any
) -> dict[str, Any]:
    return {"rate": rate, "prompt": prompt, "output": output, **rest}


def scenario(
    *mixes: dict[str, Any],
    seconds: float = 60.0,
    machine: dict[str, Any] | None = None,
    **rest: Any,
) -> Scenario:
    raw = {
        "seconds": seconds,
        "machines": {"prefill": {**MACHINE, **(machine or {})}},
        "traffic": {"mixes": list(mixes)},
        **rest,
    }
    return parse_scenario(raw)
