"""Sources of model weights: safetensors files, or a random generator."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.layers import LinearFactory, ModelWeights, build_weights
from engine.model.linear import make_linear
from engine.model_config.config import ModelConfig
from protocol.errors import StartupError


class CheckpointTensors:
    """The tensors of ``folder/*.safetensors``, one file or many shards, converted to ``dtype`` on
    ``device``. With ``finite``, values that are not finite are refused.

    Raises StartupError where there are no such files, or where they cannot be read."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, *, finite: bool = False
    ) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._finite = finite
        try:
            files = [
                safe_open(p, framework="pt", device=str(device))
                for p in sorted(folder.glob("*.safetensors"))
            ]
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{folder}: cannot read the weights: {error}") from error
        if not files:
            raise StartupError(
                f"{folder}: no *.safetensors file; expected the model's weights there"
            )
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of ``shape``. Raises StartupError with its name if it is missing, has
        another shape, or is not finite in ``dtype``."""
        # On a CPU the tensor is a view of the mapped file. It is copied, because a process that
        # writes to the file would otherwise change the model.
        tensor = self.stored(name, shape).to(self._dtype, copy=self._device.type == "cpu")
        if self._finite and not bool(tensor.isfinite().all()):
            kind = str(self._dtype).removeprefix("torch.")
            raise StartupError(
                f"{self._folder}: tensor {name} has values that are not finite in {kind}"
            )
        return tensor

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the same tensor [*shape] in the type that the file has."""
        if name not in self._file_of:
            raise StartupError(f"{self._folder}: tensor {name} is missing from the weights")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise StartupError(
                f"{self._folder}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
        return tensor


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda _: None,
    linear: LinearFactory = make_linear,
    *,
    finite: bool = False,
) -> ModelWeights:
    """Load the model in ``folder``; ``linear`` makes its layers. With ``finite``, values that are
    not finite are refused.

    Raises StartupError with the name of a tensor that is missing or has an unexpected shape.
    """
    source = CheckpointTensors(folder, dtype, device, finite=finite)
    return build_weights(source, config, progress, linear)


def tensor_shapes(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return the name and shape of every tensor in a checkpoint of this model."""
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def _record(name: str, shape: tuple[int, ...]) -> Tensor:
        shapes.append((name, shape))
        return torch.empty(shape, device="meta")

    build_weights(_record, config)
    return shapes


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, std: float = 0.05
) -> ModelWeights:
    """Return weights drawn from N(0, std^2), with norms of one: for benchmarks and tests."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def _draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full(shape, 1.0 - config.norm_offset, dtype=dtype, device=device)
        noise = torch.randn(shape, generator=generator, device=device)
        return noise.mul_(std).to(dtype)

    return build_weights(_draw, config)
