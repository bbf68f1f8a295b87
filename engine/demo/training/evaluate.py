"""Held-out metrics of the trained pair by position in the context, and sample completions."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from engine.demo.training.corpus import EOS, Tokens
from engine.demo.training.networks import MAX_LEN, Llama

BUCKETS = ((0, 128), (128, 512), (512, 1024), (1024, 2048), (2048, 4096))


@dataclass(frozen=True)
class HeldOutMetrics:
    """Averages over a set of held-out tokens: one row of the results table."""

    tokens: int
    target_perplexity: float
    draft_perplexity: float
    greedy_agreement: float
    expected_acceptance: float


@dataclass(frozen=True)
class HeldOutResults:
    """Held-out metrics, overall and by position in the context."""

    files: int
    full_windows: int
    overall: HeldOutMetrics
    by_position: dict[str, HeldOutMetrics]


@dataclass
class MetricSums:
    """Running sums of the metrics that ``token_metrics`` returns."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, metrics: dict[str, Tensor], low: int = 0, high: int = MAX_LEN) -> None:
        """Add the metrics [tokens] of positions ``low`` to ``high``, the latter excluded."""
        for key, values in metrics.items():
            self.sums[key] += values[low:high].sum().item()

    def averages(self) -> HeldOutMetrics:
        n = max(1.0, self.sums["tokens"])
        return HeldOutMetrics(
            tokens=int(self.sums["tokens"]),
            target_perplexity=math.exp(self.sums["target"] / n),
            draft_perplexity=math.exp(self.sums["draft"] / n),
            greedy_agreement=self.sums["agree"] / n,
            expected_acceptance=self.sums["accept"] / n,
        )


def token_metrics(target: Llama, draft: Llama, piece: Tensor) -> dict[str, Tensor]:
    """Return losses, agreement and acceptance probability for each token of a piece [n + 1].

    Each value is [n]. The acceptance probability is that of speculative sampling at temperature 1.
    """
    y = piece[1:, None]
    t = target(piece[None, :-1])[0].log_softmax(-1)
    d = draft(piece[None, :-1])[0].log_softmax(-1)
    return {
        "tokens": torch.ones(len(y)),
        "target": -t.gather(1, y)[:, 0],
        "draft": -d.gather(1, y)[:, 0],
        "agree": (t.argmax(-1) == d.argmax(-1)).float(),
        "accept": torch.minimum(t, d).exp().sum(-1),
    }


@torch.no_grad()
def evaluate(target: Llama, draft: Llama, docs: list[Tokens]) -> HeldOutResults:
    """Compute perplexities and draft agreement on held-out files.

    Every row by position comes from the same windows: all full windows of ``MAX_LEN`` predicted
    tokens, cut one after another from each file's start. The overall metrics include the remainder
    at the files' ends and the files shorter than a window.
    """
    buckets = {bucket: MetricSums() for bucket in BUCKETS}
    overall = MetricSums()
    full_windows = 0
    for doc in docs:
        for start in range(0, len(doc) - 1, MAX_LEN):
            piece = torch.from_numpy(doc[start : start + MAX_LEN + 1])
            metrics = token_metrics(target, draft, piece)
            overall.add(metrics)
            if len(piece) == MAX_LEN + 1:
                full_windows += 1
                for (low, high), sums in buckets.items():
                    sums.add(metrics, low, high)
    return HeldOutResults(
        files=len(docs),
        full_windows=full_windows,
        overall=overall.averages(),
        by_position={f"{low}-{high - 1}": sums.averages() for (low, high), sums in buckets.items()},
    )


@torch.no_grad()
def quick_loss(model: Llama, docs: list[Tokens]) -> float:
    """Return the held-out loss on a small fixed sample, which training prints as progress."""
    stream = torch.from_numpy(np.concatenate(docs))
    rows = stream[: len(stream) // 513 * 513].view(-1, 513)
    rows = rows[:: max(1, len(rows) // 32)][:32]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()


@torch.no_grad()
def complete(
    model: Llama, tokenizer: Tokenizer, prompt: str, temperature: float, tokens: int = 120
) -> str:
    """Complete a prompt without adding a BOS token; greedy if the temperature is zero."""
    generator = torch.Generator().manual_seed(0)
    ids = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        logits = model(torch.tensor([ids]))[0, -1]
        if temperature:
            p = (logits / temperature).softmax(-1)
            token = int(torch.multinomial(p, 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == tokenizer.token_to_id(EOS):
            break
        ids.append(token)
    text: str = tokenizer.decode(ids)
    return text
