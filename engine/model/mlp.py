"""The feed-forward part of a layer: gated and dense, or a mixture of experts.

    dense     down(act(gate x) * up x)
    experts   sum over the chosen experts e of  p_e * down_e(act(gate_e x) * up_e x)

Experts are computed grouped (Gale et al., MegaBlocks, section 4): the rows are sorted by expert, so
that each expert multiplies the rows that chose it in one product, whichever tokens they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.linear import Linear, linear
from engine.model_config.config import Activation, Moe


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up of [T, 2 * intermediate]: [T, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh").mul_(up)


class Mlp(Protocol):
    bytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] to [T, hidden]."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` [T, hidden] plus the result; a new tensor."""


class DenseMlp:
    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation
        self.bytes = gate_up.bytes + down.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(activate(self._gate_up(x), self._activation))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._down.add(activate(self._gate_up(x), self._activation), residual)


@dataclass(frozen=True)
class ExpertWeights:
    """All experts of one layer."""

    router: Tensor  # [experts, hidden]
    gate_up: Tensor  # [experts, 2 * intermediate, hidden]
    down: Tensor  # [experts, hidden, intermediate]


class MoeMlp:
    """A mixture of experts; the router's choice is by probability, computed in fp32."""

    def __init__(self, weights: ExpertWeights, moe: Moe, activation: Activation) -> None:
        self._moe = moe
        self._router = linear(weights.router)
        self._ids = torch.arange(moe.experts, device=weights.router.device)
        experts = PackedExperts if weights.down.device.type == "cpu" else GroupedExperts
        self._experts: PackedExperts | GroupedExperts = experts(weights, activation)
        self.bytes = self._router.bytes + sum(
            t.numel() * t.element_size() for t in (weights.gate_up, weights.down)
        )

    def __call__(self, x: Tensor) -> Tensor:
        probability = self._router(x).softmax(dim=-1, dtype=torch.float32)  # [T, experts]
        weight, chosen = probability.topk(self._moe.per_token, dim=-1)  # [T, k]
        if self._moe.renormalize:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)  # [T * k]
        source = order // self._moe.per_token  # the row of each pair
        ends = torch.searchsorted(expert, self._ids, right=True, out_int32=True)
        out = self._experts(x[source], ends)  # [T * k, hidden], by expert
        out = out * weight.flatten()[order, None].to(x.dtype)
        # Back in the order of the rows, where a sum over k gives the same result every time.
        return torch.empty_like(out).index_copy_(0, order, out).view(len(x), -1, x.shape[1]).sum(1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self(x)


class PackedExperts:
    """On a CPU: one product for each expert that any row chose."""

    def __init__(self, weights: ExpertWeights, activation: Activation) -> None:
        self._gate_up = [linear(w) for w in weights.gate_up]
        self._down = [linear(w) for w in weights.down]
        self._activation = activation

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [rows, hidden]; the rows of expert e end at ``ends[e]`` (int32): [rows, hidden]."""
        parts, start = [], 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                rows = self._gate_up[expert](x[start:end])
                parts.append(self._down[expert](activate(rows, self._activation)))
                start = end
        return torch.cat(parts)


class GroupedExperts:
    """On a GPU: one grouped product for all experts; who has how many rows stays on the device."""

    def __init__(self, weights: ExpertWeights, activation: Activation) -> None:
        self._gate_up = weights.gate_up.transpose(1, 2)
        self._down = weights.down.transpose(1, 2)
        self._activation = activation

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [rows, hidden]; the rows of expert e end at ``ends[e]`` (int32): [rows, hidden]."""
        rows = F.grouped_mm(x, self._gate_up, offs=ends)
        return F.grouped_mm(activate(rows, self._activation), self._down, offs=ends)
