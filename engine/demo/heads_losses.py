"""What the heads are trained on: to say what the target says, further on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.heads_models import EagleHead, Keys, MedusaHeads, eagle_step, features
from engine.demo.models import Llama

FEATURE_WEIGHT = 0.5
"""Of the features' loss beside the predictions' (EAGLE, section 4.2)."""


ROWS = 128
"""Predictions that are compared at a time, so that they stay in a cache."""


class _Divergence(torch.autograd.Function):
    """Cross-entropy of what is read from rows with what the target reads from others, and its
    gradients at once: neither's predictions are ever there as a whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reading: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        """x, wanted: [rows, hidden]; reading, weight: [vocab, hidden]; the average over rows."""
        total, gradients = x.new_zeros((), dtype=torch.float32), []
        learns = ctx.needs_input_grad[1]
        gradient = torch.zeros_like(reading, dtype=torch.float32) if learns else None
        for rows, meant in zip(x.split(ROWS), wanted.split(ROWS), strict=True):
            p = F.linear(meant, weight).float().softmax(-1)
            logits = F.linear(rows, reading).float()
            normalizer = logits.logsumexp(-1, keepdim=True)
            total += (normalizer - (p * logits).sum(-1, keepdim=True)).sum()
            error = logits.sub_(normalizer).exp_().sub_(p).to(x.dtype)
            gradients.append(error @ reading)
            if gradient is not None:
                gradient += error.t() @ rows
        ctx.save_for_backward(torch.cat(gradients).div_(len(x)))
        ctx.gradient = None if gradient is None else gradient.div_(len(x))
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        of_reading = None if ctx.gradient is None else ctx.gradient * outer
        return ctx.saved_tensors[0] * outer, of_reading, None, None


def divergence(x: Tensor, wanted: Tensor, target: Llama, reading: Tensor | None = None) -> Tensor:
    """Cross-entropy of the predictions that ``reading`` [vocab, hidden] makes of features ``x``
    with those that the target makes of ``wanted``, both of any one shape [..., hidden]; None: the
    target reads both. Products are made in bfloat16."""
    weight = target.model.embed_tokens.weight.bfloat16()
    with torch.autocast("cpu", enabled=False):
        rows, meant = x.flatten(0, -2).bfloat16(), wanted.flatten(0, -2).bfloat16()
        read = weight if reading is None else reading.bfloat16()
        loss: Tensor = _Divergence.apply(rows, read, meant, weight)  # type: ignore[no-untyped-call]
    return loss


def teach(target: Llama, ids: Tensor) -> Tensor:
    """The target's features of ids [batch, length]: [batch, length, hidden]."""
    with torch.no_grad():
        return features(target, ids)


def medusa_losses(heads: MedusaHeads, target: Llama, ids: Tensor) -> list[Tensor]:
    """Of each head: how it foretells at t what the target predicts at t + 1 + i."""
    seen = teach(target, ids)
    losses = []
    for i, head in enumerate(heads):
        assert isinstance(head, nn.Sequential)
        x, reading = head[:-1](seen[:, : -1 - i]), head[-1].weight
        assert isinstance(reading, Tensor)
        losses.append(divergence(x, seen[:, 1 + i :], target, reading))
    return losses


def eagle_losses(
    head: EagleHead, target: Llama, ids: Tensor, segment: int, steps: int
) -> list[Tensor]:
    """Of each unrolled step. The head attends within segments of a text, because in use it does
    not know what came before: ids [batch, n * segment + 1]."""
    seen = teach(target, ids)

    def cut(x: Tensor) -> Tensor:
        out: Tensor = x.unflatten(1, (-1, segment)).flatten(0, 1)
        return out

    before, after = cut(seen[:, :-1]), cut(seen[:, 1:])
    embedded = target.model.embed_tokens(cut(ids[:, 1:])).detach()
    cos, sin = target.cos[:segment], target.sin[:segment]
    losses, keys, known = [], Keys(), before
    for step in range(steps):
        out = eagle_step(head, keys, head.join(embedded, known), cos, sin)
        loss = divergence(out[:, step:], after[:, step:], target)
        gap = F.smooth_l1_loss(out[:, step:].float(), after[:, step:].float())
        losses.append(loss + FEATURE_WEIGHT * gap)
        known = torch.cat((before[:, :1], out[:, :-1]), 1)
    return losses
