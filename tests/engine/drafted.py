"""Batches of sequences whose random drafts are verified, and the plain path's draws to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling.sampler import Sampler
from engine.sampling.sampling_metadata import DraftRows
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Phase
from engine.scheduling.sequence import Sequence as Running
from engine.structured_output.masks import ForbiddenTokens
from protocol.requests import Logprobs, Request
from protocol.sampling_params import SamplingParams
from tests.engine.sampling_oracle import EOS, options

VOCAB = 150
LENGTH = 64
LIKELY = 3
Tree = list[tuple[int, int]]
"""(parent, token) of each node; parent -1 is the root."""


@dataclass(frozen=True)
class Case:
    """One sequence and its draft trees for several steps."""

    sampling: SamplingParams
    prompt: tuple[int, ...]
    steps: tuple[Tree, ...]
    bound: bool  # whether a grammar forbids tokens


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    """Generate sampling parameters; most keep their default in two thirds of the cases."""

    def sometimes(values: st.SearchStrategy[Any], off: Any) -> Any:
        return draw(values) if draw(st.integers(0, 2)) == 0 else off

    token = st.integers(0, VOCAB - 1)
    bias = st.dictionaries(token, st.floats(-100, 100, width=32), max_size=6)
    return options(
        seed=draw(st.integers(0, 2**63 - 1)),
        choice=draw(st.integers(0, 3)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0])),
        top_p=sometimes(st.floats(0.05, 0.99), 1.0),
        top_k=sometimes(st.sampled_from([1, 5, 70, 140]), 0),
        min_p=sometimes(st.floats(0.001, 0.5), 0.0),
        repetition_penalty=sometimes(st.floats(0.3, 3.0), 1.0),
        presence_penalty=sometimes(st.floats(-2, 2), 0.0),
        frequency_penalty=sometimes(st.floats(-2, 2), 0.0),
        logit_bias=tuple(sometimes(bias, {}).items()),
        min_tokens=sometimes(st.integers(1, 8), 0),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(sometimes(st.lists(token, max_size=3), [])),
        logprobs=(logprobs := sometimes(st.sampled_from([0, 1, 20, VOCAB]), None)),
        allowed_token_ids=tuple(sometimes(st.lists(token, min_size=1, max_size=9), [])),
        logprob_token_ids=()
        if logprobs is None
        else tuple(sometimes(st.lists(token, min_size=1, max_size=4, unique=True), [])),
    )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Generate a chain or a tree; the children of a parent differ.

    Only a few tokens are used, so that drafts repeat and are often accepted."""
    chain, nodes = draw(st.booleans()), draw(st.integers(0, 5))
    out: Tree = []
    for _ in range(nodes):
        parent = len(out) - 1 if chain else draw(st.integers(-1, len(out) - 1))
        node = (parent, draw(st.integers(0, LIKELY - 1)))
        if node not in out:
            out.append(node)
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    steps = tuple(draw(trees()) for _ in range(3))
    return Case(draw(samplings()), tuple(prompt), steps, draw(st.integers(0, 3)) == 0)


def path_to(tree: Tree, node: int) -> list[int]:
    """Return the tokens from the root of the tree to the node."""
    parent, token = tree[node]
    return [*(path_to(tree, parent) if parent >= 0 else []), token]


def sequence_of(case: Case, index: int, emitted: list[int]) -> Running:
    request = Request(
        id=str(index), prompt=case.prompt, emitted=tuple(emitted), sampling=case.sampling
    )
    return Running(index, request, Phase.DECODE)


def logits_after(case: Case, output: list[int]) -> Tensor:
    """Return pseudo-random logits [vocab] for the text that favor the tokens of the draft trees."""
    seed = hash((case.prompt, tuple(output))) % 2**31
    out = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    out[:LIKELY] += 7
    return out


def forbidden_after(output: list[int]) -> Tensor:
    """Return the grammar's mask of forbidden tokens [vocab] after the output."""
    seed = hash(tuple(output)) % 2**31
    return torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed)) < 0.6


def forbidden_tokens(cases_: list[tuple[Case, list[int]]]) -> ForbiddenTokens | None:
    at = [i for i, (case, _) in enumerate(cases_) if case.bound]
    return (
        ForbiddenTokens(at, torch.stack([forbidden_after(cases_[i][1]) for i in at]))
        if at
        else None
    )


def new_table(rows: int) -> SamplingTable:
    return SamplingTable(rows, LENGTH, VOCAB, (EOS,), torch.device("cpu"))


def draw_without_drafts(case: Case, output: list[int]) -> tuple[int, Logprobs | None]:
    """Draw the next token of one sequence without drafts."""
    sequence, table = sequence_of(case, 0, output), new_table(1)
    sequence.take_row(0, 1)
    table.set_row(sequence)
    at = torch.tensor([len(sequence.tokens)])
    logits = logits_after(case, output)[None]
    tokens, reports = Sampler(table)(
        [sequence], logits, at * 0, at, forbidden_tokens([(case, output)])
    ).read()
    return tokens[0], reports[0] if reports else None


class VerifiedBatch:
    """A batch of sequences that step together; all of their drafts are verified."""

    def __init__(self, cases_: list[Case]) -> None:
        self.cases = cases_
        self.table = new_table(len(cases_) + 2)
        self.draw = Sampler(self.table)
        self.sequences = [sequence_of(case, i, []) for i, case in enumerate(cases_)]
        for i, sequence in enumerate(self.sequences):
            sequence.take_row(len(cases_) + 1 - i, i + 1)
            self.table.set_row(sequence)
        self.rows = torch.tensor([s.row for s in self.sequences])

    def output(self, index: int) -> list[int]:
        return self.sequences[index].tokens[len(self.cases[index].prompt) :]

    def step(self, drafts: list[Tree]) -> tuple[list[list[int]], list[int], list[Logprobs | None]]:
        """Verify one step. Return the output before each row, its drawn token and its logprobs."""
        owner, paths = [], []
        for index, tree in enumerate(drafts):
            for path in ([], *(path_to(tree, node) for node in range(len(tree)))):
                owner.append(index)
                paths.append(path)
        deepest = max(map(len, paths))
        nodes = DraftRows(
            torch.tensor(owner),
            np.bincount(owner),
            torch.tensor([len(path) for path in paths]),
            torch.tensor([[*p, *[-1] * (deepest - len(p))] for p in paths], dtype=torch.int64),
        )
        known = torch.tensor([len(s.tokens) for s in self.sequences])
        outputs = [self.output(i) + path for i, path in zip(owner, paths, strict=True)]
        texts = [(self.cases[i], output) for i, output in zip(owner, outputs, strict=True)]
        logits = torch.stack([logits_after(*text) for text in texts])
        tokens, reports = self.draw.verify(
            self.sequences,
            logits,
            self.rows,
            known[nodes.owner] + nodes.depth,
            nodes,
            forbidden_tokens(texts),
        ).read()
        self.accept(drafts, tokens, known)
        return outputs, tokens, reports or [None] * len(owner)

    def accept(self, drafts: list[Tree], drawn: list[int], known: Tensor) -> None:
        """Append the accepted drafts and the token drawn after them; known: [sequences]."""
        start, texts = 0, []
        for tree in drafts:
            row, text = 0, [drawn[start]]
            for node, (parent, token) in enumerate(tree):
                if parent == row - 1 and token == text[-1]:
                    row = node + 1
                    text.append(drawn[start + row])
            texts.append(text)
            start += 1 + len(tree)
        most = max(map(len, texts))
        padded = torch.tensor([[*t, *t[-1:] * (most - len(t))] for t in texts])
        counts = torch.tensor([len(text) for text in texts])
        self.draw.append(self.sequences, self.rows, known, padded, counts)
        for sequence, text in zip(self.sequences, texts, strict=True):
            sequence.tokens += text

    def plain(self) -> None:
        """Run a step without drafts."""
        at = torch.tensor([len(s.tokens) for s in self.sequences])
        texts = [(case, self.output(i)) for i, case in enumerate(self.cases)]
        logits = torch.stack([logits_after(*text) for text in texts])
        draw = self.draw(self.sequences, logits, self.rows, at, forbidden_tokens(texts))
        for sequence, token in zip(self.sequences, draw.read()[0], strict=True):
            sequence.tokens.append(token)
