"""Where weights come from: safetensors, or a random generator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.layers import Product, Weights, assemble
from engine.model.linear import linear
from engine.model_config.config import ModelConfig
from protocol.errors import StartupError


class Tensors:
    """The tensors of ``folder/*.safetensors``, one file or many shards. ``finite``: values that are
    not are refused.

    Raises StartupError where there are none, or where they cannot be read."""

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
        self._holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> Collection[str]:
        return self._holder.keys()

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises StartupError naming the tensor that is missing, has another shape, or is not
        finite in the type that it is computed in."""
        # On a CPU it lies in the mapped file, which must not be needed once it is loaded: who
        # writes to the file would write to the model.
        tensor = self.stored(name, shape).to(self._dtype, copy=self._device.type == "cpu")
        if self._finite and not bool(tensor.isfinite().all()):
            kind = str(self._dtype).removeprefix("torch.")
            raise StartupError(
                f"{self._folder}: tensor {name} has values that are not finite in {kind}"
            )
        return tensor

    def stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same in the type that it has in the file."""
        if name not in self._holder:
            raise StartupError(f"{self._folder}: tensor {name} is missing from the weights")
        tensor: Tensor = self._holder[name].get_tensor(name)
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
    product: Product = linear,
    *,
    finite: bool = False,
) -> Weights:
    """Load the model in ``folder``; ``product``: how its weights are multiplied with; ``finite``:
    values that are not are refused.

    Raises StartupError naming the tensor that is missing or has another shape than expected.
    """
    return assemble(Tensors(folder, dtype, device, finite=finite), config, progress, product)


def names(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a checkpoint of this shape holds, with its shape."""
    wanted: list[tuple[str, tuple[int, ...]]] = []

    def record(name: str, shape: tuple[int, ...]) -> Tensor:
        wanted.append((name, shape))
        return torch.empty(shape, device="meta")

    assemble(record, config)
    yield from wanted


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, std: float = 0.05
) -> Weights:
    """Weights drawn from N(0, std^2), norms one: for benchmarks and tests."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full(shape, 1.0 - config.norm_offset, dtype=dtype, device=device)
        noise = torch.randn(shape, generator=generator, device=device)
        return noise.mul_(std).to(dtype)

    return assemble(get, config)
