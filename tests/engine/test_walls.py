"""Compute and bandwidth, provoked: an engine runs into either, and its figures say which."""

from __future__ import annotations

import os
import time

import msgspec
import pytest
import torch

from bench.lib.engines import SHAPE_100M, engine_config
from cluster.models.locate import demo_path
from cluster.worker.engine_main import POLICIES
from cluster.worker.utilisation import UtilisationSample, WorkerLimits, compute_utilisation
from engine.execution.engine import Engine
from engine.execution.machine_ceilings import measure_ceilings
from engine.ipc.counters import EngineCounters, SpeculationStatus
from engine.ipc.settings import MachineCeilings
from engine.model.decoder import DecoderModel
from engine.model.weights import random_weights
from engine.model_config.checkpoint import load_config
from engine.process.meter import StepMeter
from protocol.registry.directory import WorkerUtilisation
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from router.walls.binding import find_binding_wall

CPU = torch.device("cpu")


def request(prompt: int, tokens: int) -> Request:
    """One that meets nothing in a cache."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    context = tuple(1 + i % 250 for i in range(prompt))
    return Request(id="a", prompt=context, sampling=sampling, cache_root=os.urandom(16))


@pytest.fixture(scope="module")
def large() -> DecoderModel:
    """35 M parameters, 130 MB: more than most caches hold."""
    names = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size"}
    names |= {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads"}
    shape = {names[name]: n for name, n in SHAPE_100M.items() if name in names}
    layers = {"layers": 4, "windows": (0,) * 4, "head_dim": SHAPE_100M["head_dim"]}
    config = msgspec.structs.replace(load_config(demo_path()), **shape, **layers)
    torch.set_num_threads(1)
    return DecoderModel(config, random_weights(config, torch.float32, CPU), 1024)


def measured(model: DecoderModel, role: str, prompt: int, tokens: int) -> WorkerUtilisation:
    """Of an engine that runs one request, in the processor's time: who else is on the machine does
    not count."""
    sizes = engine_config(pages=256, max_batch=8, chunk=512, max_model_len=1024)
    engine = Engine(model, sizes, POLICIES[role])
    top = measure_ceilings(MachineCeilings(), CPU, model.dtype, model.weights.bytes)
    for handle in (1, 2):  # the first one makes the products
        engine.generate(handle, request(prompt, tokens))
        meter = StepMeter(engine, time.process_time, SpeculationStatus())
        while plan := engine.plan():
            meter.run(plan)
    done = meter.beat().counters
    done.done.seconds += 1.0  # long enough to count
    machine = WorkerLimits(top, 0.0, 4, 1.0, 1.0, gpu=False)
    samples = UtilisationSample(0.0, EngineCounters(), 0, 0.0), UtilisationSample(1.0, done, 0, 0.0)
    found = compute_utilisation(*samples, machine, drafts=False)
    assert found is not None
    return msgspec.structs.replace(found, busy=1.0)


def test_one_stream_of_a_large_model_is_bound_by_bandwidth(large: DecoderModel) -> None:
    found = measured(large, "decode", prompt=1, tokens=24)
    assert found.bandwidth > 2 * found.compute
    assert find_binding_wall(found).wall == "bandwidth", found
    assert found.batch == 1.0


def test_long_prompts_are_bound_by_compute(large: DecoderModel) -> None:
    found = measured(large, "prefill", prompt=700, tokens=1)
    assert found.compute > 2 * found.bandwidth
    assert find_binding_wall(found).wall == "compute", found
    assert found.batch == 0.0
