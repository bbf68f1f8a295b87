"""An engine process with random weights, which notes when its steps end.

It is the product's engine process (cluster/worker/engine_main.py) except that it reads only the
config of its model folder, so that a benchmark needs no file of weights. The variable
BATON_BENCH_STAMPS names a file to which it appends the time of every batch of tokens that it sends,
as doubles of time.monotonic: the front's own event loop would add its delays.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cluster.worker import engine_main
from engine.execution import loading
from engine.ipc import messages as m
from engine.ipc.channel import EngineChannel
from engine.model.layers import LinearFactory, ModelWeights
from engine.model.linear import make_linear
from engine.model.weights import random_weights, tensor_shapes
from engine.model_config.checkpoint import WeightShards, load_config
from engine.model_config.config import ModelConfig

STAMPS = "BATON_BENCH_STAMPS"
_STAMP = struct.Struct("<d")


class _StampingChannel(EngineChannel[m.Command]):
    """Notes the time before it sends tokens."""

    _file = -1

    def send(self, messages: Sequence[Any]) -> None:
        if any(isinstance(message, m.TokensDrawn) for message in messages):
            if self._file < 0:
                self._file = os.open(os.environ[STAMPS], os.O_WRONLY | os.O_APPEND)
            os.write(self._file, _STAMP.pack(time.monotonic()))
        super().send(messages)


def read_stamps(path: Path) -> list[float]:
    """Return the times in a file of stamps."""
    data = path.read_bytes()
    whole = len(data) // _STAMP.size * _STAMP.size
    return [at for (at,) in _STAMP.iter_unpack(data[:whole])]


def _draw_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda _: None,
    linear: LinearFactory = make_linear,
    *,
    finite: bool = False,
) -> ModelWeights:
    return random_weights(config, dtype, device)


def declare_shards(folder: Path) -> WeightShards:
    """Return what the files of weights would say, of which a plan of a GPU's memory is made."""
    elements = {name: math.prod(shape) for name, shape in tensor_shapes(load_config(folder))}
    return WeightShards(files=0, file_bytes=0, elements=elements)


def _replace(module: ModuleType, name: str, value: object) -> None:
    """Replace what ``module`` has imported as ``name``."""
    assert hasattr(module, name), f"{module.__name__} does not use {name} any more"
    setattr(module, name, value)


def main() -> None:
    _replace(loading, "load_weights", _draw_weights)
    _replace(loading, "read_shards", declare_shards)
    _replace(engine_main, "EngineChannel", _StampingChannel)
    engine_main.main()


if __name__ == "__main__":
    main()
