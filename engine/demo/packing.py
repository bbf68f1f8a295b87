"""Training batches: encoded documents packed into windows of one length."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.demo.tokenizer import Tokens


class Packer:
    """Batches of packed windows. Batch ``i`` depends on the seed and ``i`` only."""

    def __init__(self, docs: list[Tokens], length: int, batch: int, seed: int) -> None:
        self.docs, self.length, self.batch, self.seed = docs, length, batch, seed
        total = sum(len(d) for d in docs)
        self.per_pass = (total - length) // (length + 1) // batch
        self.loaded_pass = -1
        self.windows: Tokens = np.zeros((0, length + 1), dtype=np.int64)

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch ``index``: the tokens, and for each the token after it."""
        which, offset = divmod(index, self.per_pass)
        if which != self.loaded_pass:
            self.windows = self.shuffled_windows(which)
            self.loaded_pass = which
        rows = torch.from_numpy(self.windows[offset * self.batch : (offset + 1) * self.batch])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def shuffled_windows(self, which: int) -> Tokens:
        """One pass over the documents: shuffled, joined, cut into windows, shuffled again."""
        rng = np.random.default_rng([self.seed, which])
        stream = np.concatenate([self.docs[i] for i in rng.permutation(len(self.docs))])
        stream = stream[rng.integers(self.length) :]
        count = self.per_pass * self.batch
        windows = stream[: count * (self.length + 1)].reshape(count, self.length + 1)
        return windows[rng.permutation(count)]
