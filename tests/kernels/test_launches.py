"""What a decode step launches, and how often the host waits: counted on the CPU, without graphs.

Every operation of torch that computes is one launch on a GPU, and so is every Triton kernel. Views
and allocations launch nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.kernels.fp8 import INTERPRETED
from engine.model.decoder import DecoderModel
from engine.model.linear import TorchLinear
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.scheduling.step_policy import plan_decode_step
from tests.engine.conftest import request
from tests.engine.families import save

MOST_PER_LAYER = 12
MOST_BESIDE_LAYERS = 12
"""Inputs, embedding, final norm, head, draw, and what moves the tokens."""

WITHOUT_LAUNCH = {
    *("view", "_unsafe_view", "slice", "select", "unsqueeze", "expand", "t", "transpose", "split"),
    *("split_with_sizes", "unbind", "alias", "detach", "permute", "as_strided", "empty"),
    *("new_empty", "empty_like", "squeeze", "empty_strided", "_reshape_alias", "lift_fresh"),
    *("flatten", "resolve_conj", "resolve_neg"),
}
WAITS = {
    *("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"),
    *("nonzero", "unique", "masked_select"),
}


class Launches(TorchDispatchMode):
    """Counts the operations that compute, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in WITHOUT_LAUNCH:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts the calls that wait for a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count launches and waits; the work of the interpreter itself does not count."""
    launches, waits = Launches(), Waits()
    run: Callable[..., Any] = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.counts[self.fn.__name__] += 1
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    with launches, waits:
        yield launches.counts, waits.counts
    monkeypatch.undo()


def decoding_engine(folder: Path, layers: int) -> Engine:
    """Return an engine in which three sequences decode, with products that are one launch each."""
    save(folder, "llama", num_hidden_layers=layers)
    config, device = load_config(folder), torch.device("cpu")
    weights = load_weights(folder, config, torch.float32, device, linear=TorchLinear)
    model = DecoderModel(config, weights, 256, kernels=True)
    sizes = {"pages": 16, "max_batch": 4, "chunk": 32, "max_model_len": 128}
    config_ = engine_config(kv_precision="fp8", kv_storage="fp8", **sizes)
    engine = Engine(model, config_, plan_decode_step)
    for handle in range(3):
        sampling = {"temperature": 0.5 * handle, "seed": handle}
        engine.generate(handle, request(f"r{handle}", [3, 4, 5], max_tokens=60, **sampling))
    while len(engine.scheduler.decoding) < 3:
        engine.run(engine.plan())
    engine.run(engine.plan())  # the first step uploads which sequences decode
    return engine


@pytest.mark.skipif(not INTERPRETED, reason="counts the launches of Triton's interpreter")
def test_a_decode_step_has_few_launches_and_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for layers in (1, 3):
        engine = decoding_engine(tmp_path / str(layers), layers)
        plan = engine.plan()
        with counted(monkeypatch) as (launches, waits):
            engine.run(plan)
        print(f"\n{layers} layers: {dict(launches)}\nwaits: {dict(waits)}")
        found[layers] = launches.total()
        assert waits.total() == 1
    per_layer = (found[3] - found[1]) / 2
    print(f"{per_layer:.0f} launches a layer, {found[1] - per_layer:.0f} beside the layers")
    assert per_layer <= MOST_PER_LAYER
    assert found[1] - per_layer <= MOST_BESIDE_LAYERS
