"""Sampling, written once more: slowly, one token after the other, in float64. And chi-square."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.sampling_metadata import SamplingMetadata, build_sampling_metadata
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Phase
from engine.scheduling.sequence import Sequence as Running
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

EOS = 2
Row = NDArray[np.float64]


def processed(
    logits: Iterable[float], s: SamplingParams, prompt: list[int], output: list[int]
) -> Row:
    """Logits [vocab] after bias, penalties and bans."""
    row = list(logits)
    for token, bias in s.logit_bias:
        row[token] += bias
    for token in set(prompt) | set(output):
        r = s.repetition_penalty
        row[token] = row[token] / r if row[token] > 0 else row[token] * r
    for token in set(output):
        row[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    if len(output) < s.min_tokens:
        for token in (*s.stop_token_ids, *(() if s.ignore_eos else (EOS,))):
            row[token] = -math.inf
    return np.array(row)


def target(row: Row, s: SamplingParams) -> Row:
    """Probabilities [vocab] of the next token, from processed logits."""
    row = row / s.temperature
    chance = np.exp(row - row.max())
    chance /= chance.sum()
    order = sorted(range(len(row)), key=lambda token: -chance[token])
    kept = [token for token in order if chance[token] >= s.min_p * chance[order[0]]]
    kept = kept[: s.top_k or len(row)]
    whole, before, nucleus = sum(chance[token] for token in kept), 0.0, []
    for token in kept:
        if before / whole < s.top_p or s.top_p == 1.0:
            nucleus.append(token)
        before += chance[token]
    out = np.zeros(len(row))
    out[nucleus] = chance[nucleus] / chance[nucleus].sum()
    return out


def p_value(counts: Row, probabilities: Row) -> float:
    """Of Pearson's chi-square test; cells that expect fewer than 5 are taken together."""
    expected = probabilities * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    if wanted[-1] < 5:  # still too few for a cell of its own
        observed[-2] += observed[-1]
        wanted[-2] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    half = torch.tensor([(len(wanted) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def seated(
    samplings: Sequence[SamplingParams],
    prompt: list[int],
    output: list[int],
    vocab: int,
    device: str = "cpu",
) -> tuple[list[Running], Tensor, SamplingTable]:
    """Sequences with these samplings and tokens, their rows, and the table they sit in."""
    table = SamplingTable(len(samplings), 512, vocab, (EOS,), torch.device(device))
    sequences = []
    for i, s in enumerate(samplings):
        request = Request(id=str(i), prompt=tuple(prompt), emitted=tuple(output), sampling=s)
        sequences.append(Running(i, request, Phase.DECODE))
        sequences[-1].take_row(len(samplings) - 1 - i, i + 1)
        table.set_row(sequences[-1])
    return sequences, torch.arange(len(samplings) - 1, -1, -1, device=device), table


def selected(
    samplings: Sequence[SamplingParams], prompt: list[int], output: list[int], vocab: int
) -> tuple[SamplingMetadata, SamplingTable]:
    sequences, rows, table = seated(samplings, prompt, output, vocab)
    return build_sampling_metadata(sequences, rows, table), table


def options(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 400, **changes})
