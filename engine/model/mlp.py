"""The feed-forward part of a layer: gated and dense, or a mixture of experts.

    dense     down(act(gate x) * up x)
    experts   sum over the chosen experts e of  p_e * down_e(act(gate_e x) * up_e x)

Experts are computed grouped (Gale et al., MegaBlocks, section 4): the rows are sorted by expert, so
that each expert multiplies all rows that chose it in one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.linear import Linear, make_linear
from engine.model_config.config import Activation, MoeConfig

Gate = Callable[[Tensor, Activation], Tensor]
"""Returns act(gate) * up, as ``gated_activation`` does."""


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up [T, intermediate] of gate_up [T, 2 * intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh").mul_(up)


class FeedForward(Protocol):
    """The feed-forward part of one layer; ``bytes`` is the size of its weights."""

    bytes: int

    def use_gate(self, gate: Gate) -> None:
        """Compute the activation with ``gate`` from now on."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``residual`` [T, hidden] plus the result for x [T, hidden], as a new tensor."""


class DenseMlp:
    """A gated MLP; ``gate_up`` is [2 * intermediate, hidden], ``down`` [hidden, intermediate]."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation
        self._gate: Gate = gated_activation
        self.bytes = gate_up.bytes + down.bytes

    def use_gate(self, gate: Gate) -> None:
        """Compute the activation with ``gate`` from now on."""
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._gate(self._gate_up(x), self._activation))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [T, hidden], as ``FeedForward.add``."""
        return self._down.add(self._gate(self._gate_up(x), self._activation), residual)


@dataclass(frozen=True)
class ExpertWeights:
    """All experts of one layer."""

    router: Tensor  # [experts, hidden]
    gate_up: Tensor  # [experts, 2 * intermediate, hidden]
    down: Tensor  # [experts, hidden, intermediate]


class MoeMlp:
    """A mixture of experts; the router chooses by probability, computed in fp32."""

    def __init__(self, weights: ExpertWeights, moe: MoeConfig, activation: Activation) -> None:
        self._moe = moe
        self._router = make_linear(weights.router)
        self._ids = torch.arange(moe.experts, device=weights.router.device)
        experts = LoopedExperts if weights.down.device.type == "cpu" else GroupedExperts
        self._experts: LoopedExperts | GroupedExperts = experts(weights, activation)
        self.bytes = self._router.bytes + weights.gate_up.nbytes + weights.down.nbytes

    def use_gate(self, gate: Gate) -> None:
        """Compute the activation with ``gate`` from now on."""
        self._experts.gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        probability = self._router(x).softmax(dim=-1, dtype=torch.float32)  # [T, experts]
        weight, chosen = probability.topk(self._moe.per_token, dim=-1)  # [T, k]
        if self._moe.renormalize:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)  # [T * k]
        source = order // self._moe.per_token  # [T * k] the row of each pair
        ends = torch.searchsorted(expert, self._ids, right=True, out_int32=True)  # [experts]
        out = self._experts(x[source], ends)  # [T * k, hidden], by expert
        out = out * weight.flatten()[order, None].to(x.dtype)
        # Back in the order of the rows, where a sum over k gives the same result every time.
        return torch.empty_like(out).index_copy_(0, order, out).view(len(x), -1, x.shape[1]).sum(1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [T, hidden], as ``FeedForward.add``."""
        return residual + self(x)


class LoopedExperts:
    """The experts on a CPU: one product for each expert that any row chose."""

    def __init__(self, weights: ExpertWeights, activation: Activation) -> None:
        self._gate_up = [make_linear(w) for w in weights.gate_up]
        self._down = [make_linear(w) for w in weights.down]
        self._activation = activation
        self.gate: Gate = gated_activation

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return [rows, hidden] for x [rows, hidden], sorted by expert; the rows of expert e end at
        ``ends[e]``, of ends [experts] int32."""
        parts, start = [], 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                rows = self._gate_up[expert](x[start:end])
                parts.append(self._down[expert](self.gate(rows, self._activation)))
                start = end
        return torch.cat(parts)


class GroupedExperts:
    """The experts on a GPU: one grouped product for all; the counts of rows stay on the device."""

    def __init__(self, weights: ExpertWeights, activation: Activation) -> None:
        self._gate_up = weights.gate_up.transpose(1, 2)
        self._down = weights.down.transpose(1, 2)
        self._activation = activation
        self.gate: Gate = gated_activation

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return [rows, hidden]; arguments as those of ``LoopedExperts``."""
        rows = F.grouped_mm(x, self._gate_up, offs=ends)
        return F.grouped_mm(self.gate(rows, self._activation), self._down, offs=ends)
