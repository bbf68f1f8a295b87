"""A scenario's machines as the sizing policy knows them."""

from __future__ import annotations

from cluster.plan.find import shape
from cluster.plan.gpus import gpu
from cluster.plan.machine import Efficiency, machine
from cluster.simulate.machine_keys import MachineSection
from cluster.simulate.scenario import Scenario
from cluster.sizing.snapshot import Machine
from protocol.roles import Role


def machines(scenario: Scenario) -> dict[Role, Machine]:
    """Raises StartupError for a model or a GPU that is not known."""
    of = scenario.machines
    tpot_s = scenario.objectives.tpot_ms / 1e3
    prefill = _machine(of.prefill, tpot_s, of.pace)
    decode = prefill if of.decode is None else _machine(of.decode, tpot_s, of.pace)
    return {"prefill": prefill, "decode": decode}


def _machine(of: MachineSection, tpot_s: float, pace: float) -> Machine:
    link = None if of.link_gb_per_s is None else of.link_gb_per_s * 1e9
    if of.step is not None:
        assert of.kv_tokens is not None and of.kv_bytes is not None
        return Machine(
            step=of.step,
            chunk=of.chunk,
            max_batch=of.max_batch,
            kv_tokens=of.kv_tokens,
            kv_bytes=of.kv_bytes,
            link_bytes_s=link or 0.0,
        )
    assert of.gpu is not None and of.model is not None
    return machine(
        shape(of.model, "fp8", of.weight_bytes),
        gpu(of.gpu, "gpu"),
        context=of.context,
        tpot_s=tpot_s,
        chunk=of.chunk,
        max_batch=of.max_batch,
        pace=pace,
        efficiency=Efficiency(compute=of.compute, bandwidth=of.bandwidth),
        link_bytes_s=link,
        pool=of.kv_tokens,
    )
