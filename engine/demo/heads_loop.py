"""The training loop of a head, with a checkpoint to resume from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.demo.heads_recipe import HeadRecipe, learning_rate, losses, make_head, make_optimizers
from engine.demo.models import Llama
from engine.demo.packing import Packer
from engine.demo.progress import Part, restore, save
from engine.demo.tokenizer import Tokens


class HeadBatches:
    """The batch of each step: corpus, and now and then what the target made of it."""

    def __init__(self, docs: list[Tokens], own: list[Tokens], recipe: HeadRecipe) -> None:
        rows = max(1, recipe.batch_tokens // recipe.window)
        self._packers = [
            Packer(docs, recipe.window, rows, recipe.seed),
            Packer(own, recipe.window, rows, recipe.seed + 1),
        ]
        self._share = recipe.own_share

    def __call__(self, step: int) -> Tensor:
        """Token ids [rows, window + 1]."""
        turn, at = divmod(step, self._share)
        own = at == self._share - 1
        x, y = self._packers[own](turn if own else turn * (self._share - 1) + at)
        return torch.cat((x, y[:, -1:]), 1)


class HeadTrainer:
    """One head in training, the target beside it; only the head learns."""

    def __init__(self, target: Llama, recipe: HeadRecipe, checkpoint: Path) -> None:
        self.target, self.recipe, self.checkpoint = target.requires_grad_(False), recipe, checkpoint
        self.head = make_head(recipe, target)
        self.optimizers = make_optimizers(self.head, recipe)
        self.parts: list[Part] = [self.head, *self.optimizers]

    def restore(self) -> tuple[int, float]:
        """Take up the checkpoint, if there is one: (steps done, seconds spent on them)."""
        return restore(self.checkpoint, repr(asdict(self.recipe)), self.parts)

    def save(self, done: int, seconds: float) -> None:
        """Replace the checkpoint, at once."""
        save(self.checkpoint, repr(asdict(self.recipe)), self.parts, done, seconds)

    def step(self, ids: Tensor, step: int) -> list[float]:
        """One update; the losses before it."""
        with torch.autocast("cpu", torch.bfloat16):
            parts = losses(self.head, self.target, ids, self.recipe, step)
        torch.autograd.backward(torch.stack(parts).sum())
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.recipe)
            optimizer.step()
            optimizer.zero_grad()
        return [part.item() for part in parts]


def train_head(
    trainer: HeadTrainer, batches: Callable[[int], Tensor], save_every: int = 50
) -> Iterator[tuple[int, list[float], float]]:
    """Train in place; yields (steps done, losses, seconds so far) after every step."""
    done, seconds = trainer.restore()
    began = time.monotonic() - seconds
    for step in range(done, trainer.recipe.steps):
        parts = trainer.step(batches(step), step)
        seconds = time.monotonic() - began
        if (step + 1) % save_every == 0 or step + 1 == trainer.recipe.steps:
            trainer.save(step + 1, seconds)
        yield step + 1, parts, seconds
