"""Medusa heads: what is in a checkpoint, and what they make of the target's features.

    published   {head}.{block}.linear.weight, .bias            blocks: x + SiLU(W x + b)
                {head}.{blocks}.weight                         the head's own reading of the result
    vLLM's      blocks.{head}.layers.{block}.weight, .bias     the bias is optional
                lm_heads.{head}.weight

(Cai et al. 2024, Medusa, section 2.1.) Where no head has a reading of its own, the target's head
reads them all, as it does in vLLM under ``original_lm_head``; where the first one alone has, that
one reads them all.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.linear import Linear, linear
from engine.model import Model
from engine.speculation.heads_layout import refuse_pickles
from engine.weights import Tensors
from protocol.errors import StartupError

_NAMES = (
    ("{prefix}{head}.{block}.linear", "{prefix}{head}.{blocks}.weight"),
    ("{prefix}blocks.{head}.layers.{block}", "{prefix}lm_heads.{head}.weight"),
)
_PREFIXES = ("", "medusa_heads.", "medusa_head.")


@dataclass(frozen=True)
class Names:
    """Of the tensors in one checkpoint."""

    heads: int
    blocks: int
    block: str
    reading: str

    def of_block(self, head: int, block: int, part: str) -> str:
        return f"{self.block.format(head=head, block=block)}.{part}"

    def of_reading(self, head: int) -> str:
        return self.reading.format(head=head)

    def check(self, names: Collection[str], folder: Path) -> None:
        """Raises StartupError for a tensor that belongs to no head."""
        known = {self.of_reading(head) for head in range(self.heads)} | {"lm_head.weight"}
        for head in range(self.heads):
            for block in range(self.blocks):
                known |= {self.of_block(head, block, part) for part in ("weight", "bias")}
        if unknown := sorted(set(names) - known):
            raise StartupError(
                f"{folder}: tensor {unknown[0]} is of none of {self.heads} Medusa heads of"
                f" {self.blocks} blocks"
            )


def find_names(names: Collection[str], folder: Path) -> Names:
    """Which layout it is, and of how many heads. Raises StartupError where it is none of them."""
    if "token_map" in names:
        raise StartupError(f"{folder}: heads of a cut vocabulary (token_map) are not supported")
    for prefix in _PREFIXES:
        for block, reading in _NAMES:
            spelled = block.format(prefix=re.escape(prefix), head=r"(\d+)", block=r"(\d+)")
            found = [re.fullmatch(spelled + r"\.weight", name) for name in names]
            at = [(int(m[1]), int(m[2])) for m in found if m]
            if at:
                heads, blocks = max(h for h, _ in at) + 1, max(b for _, b in at) + 1
                name = block.format(prefix=prefix, head="{head}", block="{block}")
                own = reading.format(prefix=prefix, head="{head}", blocks=blocks)
                return Names(heads, blocks, name, own)
    shown = ", ".join(sorted(names)[:4])
    raise StartupError(
        f"{folder}: no Medusa heads; expected 0.0.linear.weight or blocks.0.layers.0.weight,"
        f" found {shown}"
    )


class MedusaHeads:
    """All heads of a checkpoint; the blocks of all heads are multiplied at once."""

    def __init__(self, model: Model, folder: Path) -> None:
        """Raises StartupError naming what is missing, or does not fit the target."""
        refuse_pickles(folder)
        tensors = Tensors(folder, model.dtype, model.device, finite=True)
        names = find_names(tensors.names, folder)
        names.check(tensors.names, folder)
        self.heads = names.heads
        self._model = model
        blocks = [_block(tensors, names, i, model.config.hidden_size) for i in range(names.blocks)]
        self._blocks = blocks  # each [heads, hidden, hidden] (in, out) and [heads, 1, hidden]
        self._readings = _readings(tensors, names, model)

    def __call__(self, features: Tensor, depths: int) -> Tensor:
        """Logits [depths * B, vocab] in fp32 of the first ``depths`` heads, head by head, from
        features [B, hidden], what the target's head sees."""
        x = features.expand(depths, *features.shape)
        for weight, bias in self._blocks:
            x = x + F.silu(torch.baddbmm(bias[:depths], x, weight[:depths]))
        if not self._readings:
            return self._model.read(x.flatten(0, 1))
        read = [reading(rows) for reading, rows in zip(self._readings, x, strict=False)]
        return torch.cat(read).float()


def _block(tensors: Tensors, names: Names, block: int, hidden: int) -> tuple[Tensor, Tensor]:
    weights, biases = [], []
    for head in range(names.heads):
        weight = tensors(names.of_block(head, block, "weight"), (hidden, hidden))
        bias = names.of_block(head, block, "bias")
        weights.append(weight.t())
        known = bias in tensors.names
        biases.append(tensors(bias, (hidden,)) if known else weight.new_zeros(hidden))
    return torch.stack(weights), torch.stack(biases)[:, None]


def _readings(tensors: Tensors, names: Names, model: Model) -> list[Linear]:
    """One for each head; none: the target's head reads."""
    shape = (model.config.vocab_size, model.config.hidden_size)
    own = [names.of_reading(head) for head in range(names.heads)]
    missing = [name for name in own if name not in tensors.names]
    if len(missing) == names.heads:
        return []
    if missing == own[1:]:
        return [linear(tensors(own[0], shape))] * names.heads
    return [linear(tensors(name, shape)) for name in own]
