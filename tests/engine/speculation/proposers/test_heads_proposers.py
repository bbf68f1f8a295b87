"""Medusa and EAGLE as proposers: what they propose is what their heads foretell in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.execution.engine import Engine
from engine.model.decoder import DecoderModel
from engine.sampling.filters import gumbel_noise, noise_key
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.draft_lengths import FixedDraftLength
from engine.speculation.control.speculator import Speculator
from engine.speculation.drafts import ROOT, Drafts
from engine.speculation.proposers.draft_tree import best_tree
from engine.speculation.proposers.eagle import EagleProposer
from engine.speculation.proposers.medusa import MedusaProposer
from engine.speculation.proposers.proposer import Proposer, VerifiedStep
from tests.engine.conftest import drain, request
from tests.engine.heads import (
    EAGLE3_CONFIG,
    EAGLE_CONFIG,
    TAPS,
    Reference,
    eagle3_ranks,
    eagle3_state,
    eagle_ranks,
    eagle_state,
    medusa_logits,
    medusa_state,
    write,
)

Seen = list[tuple[list[int], list[int], list[int], list[int]]]
"""Prompt, text so far, tokens proposed, their parents."""
PRIOR = [[0.5, 0.3, 0.1], [0.4, 0.2, 0.1], [0.3, 0.2]]


class Spy(Proposer):
    """A proposer that notes what it proposes."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.name, self.most, self.wants_hidden = inner.name, inner.most, inner.wants_hidden
        self.taps = inner.taps
        self.seen: Seen = []

    def passes(self, nodes: int) -> int:
        return self._inner.passes(nodes)

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        drafts = self._inner.propose(sequences, rows, wanted)
        tokens, start = drafts.tokens.tolist(), 0
        for i, sequence in enumerate(sequences):
            own = tokens[start : start + drafts.counts[i]]
            start += drafts.counts[i]
            prompt = list(sequence.request.prompt)
            self.seen.append((prompt, list(sequence.tokens), own, drafts.parents_of(i)))
        return drafts

    def observe(self, step: VerifiedStep) -> None:
        self._inner.observe(step)

    def forget(self, leases: Sequence[int]) -> None:
        self._inner.forget(leases)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Reference:
    return Reference(tiny_folder)


@pytest.fixture(scope="module")
def medusa_folder(tiny: DecoderModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa")
    return write(folder, medusa_state(tiny), {"medusa_num_heads": 3, "tree_prior": PRIOR})


@pytest.fixture(scope="module")
def eagle_folders(tiny: DecoderModel, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By version."""
    home = tmp_path_factory.mktemp("eagle")
    more = {"tree_prior": [*PRIOR, *([[0.2, 0.1]] * 5)]}
    return {
        1: write(home / "1", eagle_state(tiny), {**EAGLE_CONFIG, **more}),
        3: write(home / "3", eagle3_state(tiny), {**EAGLE3_CONFIG, **more}),
    }


@pytest.fixture(scope="module")
def eagle_folder(eagle_folders: dict[int, Path]) -> Path:
    return eagle_folders[1]


def speculate(engine: Engine, proposer: Proposer, nodes: int) -> Spy:
    spy = Spy(proposer)
    engine.speculate(Speculator(spy, FixedDraftLength(nodes), engine.model.config.vocab_size))
    return spy


def prompts(engine: Engine, temperature: float = 0.0, tokens: int = 40) -> list[list[int]]:
    """Give it requests of several lengths; their prompts."""
    texts = [[(7 * i + 3 * k) % 300 + 5 for k in range(n)] for i, n in enumerate((5, 33, 70, 1))]
    for handle, text in enumerate(texts):
        wanted = request(
            f"{handle}", text, max_tokens=tokens - 6 * handle, temperature=temperature, seed=handle
        )
        engine.generate(handle, wanted)
    return texts


def drawn_alone(make_engine: Callable[..., Engine], **options: Any) -> dict[int, list[int]]:
    engine = make_engine()
    prompts(engine, **options)
    return drain(engine)


def proposer_of(kind: str, engine: Engine, medusa: Path, eagle: Path) -> Proposer:
    if kind == "medusa":
        return MedusaProposer(engine.model, engine.state, medusa)
    return EagleProposer(engine.model, engine.state, eagle, engine.config.pages)


def test_medusa_proposes_what_its_heads_rank_first(
    make_engine: Callable[..., Engine],
    tiny: DecoderModel,
    medusa_folder: Path,
    reference: Reference,
) -> None:
    engine = make_engine()
    spy = speculate(engine, MedusaProposer(tiny, engine.state, medusa_folder), 7)
    prompts(engine)
    said = drain(engine)
    assert said == drawn_alone(make_engine)
    state, tree = medusa_state(tiny), best_tree(PRIOR, 7)
    proposed = 0
    for _, text, tokens, parents in spy.seen[::5]:
        logits = medusa_logits(state, reference.features(text)[-2])
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            ranked = logits[tree.depths[node]].topk(4).values
            found = logits[tree.depths[node], token]
            assert parent == tree.parents[node]
            assert float((found - ranked[tree.ranks[node]]).abs()) < 1e-3
            proposed += 1
    assert proposed > 50
    assert all(tokens for _, _, tokens, _ in spy.seen[4:20])  # all sequences get drafts


@pytest.mark.parametrize("nodes", [1, 4, 9])
@pytest.mark.parametrize("version", [1, 3])
def test_eagle_proposes_what_its_layer_predicts(
    make_engine: Callable[..., Engine],
    tiny: DecoderModel,
    eagle_folders: dict[int, Path],
    reference: Reference,
    version: int,
    nodes: int,
) -> None:
    engine = make_engine()
    proposer = EagleProposer(tiny, engine.state, eagle_folders[version], engine.config.pages)
    assert proposer.taps == (TAPS if version == 3 else ())
    spy = speculate(engine, proposer, nodes)
    prompts(engine)
    assert drain(engine) == drawn_alone(make_engine)
    state, ranks, proposed = eagle_state(tiny), eagle_ranks, 0
    if version == 3:
        state, ranks = eagle3_state(tiny), eagle3_ranks
    tree = best_tree([*PRIOR, *([[0.2, 0.1]] * 5)], nodes, spine_only=True)
    for prompt, text, tokens, parents in spy.seen[::7]:
        if not tokens:
            continue
        logits = ranks(state, reference, text, len(prompt), tree.deepest[len(tokens) - 1])
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            ranked = logits[tree.depths[node]].topk(4).values
            found = logits[tree.depths[node]][token]
            assert parent == tree.parents[node]
            assert float((found - ranked[tree.ranks[node]]).abs()) < 1e-3
            proposed += 1
    assert proposed > 10 * nodes / 2


class SomeLengths(FixedDraftLength):
    """Nothing for a while, then unequal numbers."""

    def __init__(self, pause: int) -> None:
        super().__init__(0)
        self._pause, self._step = pause, 0

    def choose_lengths(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        self._step += 1
        if self._step % (self._pause + 3) < self._pause:
            return []
        return [(self._step + 2 * i) % 6 for i in range(len(decoding))]


@pytest.mark.parametrize("pause", [2, 20, 70])
def test_eagle_catches_up_after_steps_without_proposals(
    make_engine: Callable[..., Engine],
    tiny: DecoderModel,
    eagle_folder: Path,
    reference: Reference,
    pause: int,
) -> None:
    engine = make_engine()
    spy = Spy(EagleProposer(tiny, engine.state, eagle_folder, engine.config.pages))
    vocab = tiny.config.vocab_size
    engine.speculate(Speculator(spy, SomeLengths(pause), vocab))
    prompts(engine, tokens=150)
    assert drain(engine) == drawn_alone(make_engine, tokens=150)
    state = eagle_state(tiny)
    compared = 0
    for prompt, text, tokens, _ in spy.seen:
        if not tokens or (pause == 70 and compared):
            continue
        start = max(len(prompt), len(text) - 64) if pause == 70 else len(prompt)
        logits = eagle_ranks(state, reference, text, start, 1)[0]
        assert float(logits.max() - logits[tokens[0]]) < 1e-3
        compared += 1
    assert compared > (0 if pause == 70 else 10)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_reassigned_row_gets_no_stale_drafts(
    make_engine: Callable[..., Engine], medusa_folder: Path, eagle_folder: Path, kind: str
) -> None:
    """Rows and pages are few: sequences wait, are preempted, and come back elsewhere."""
    engine = make_engine(pages=9, max_batch=3)
    spy = speculate(engine, proposer_of(kind, engine, medusa_folder, eagle_folder), 5)
    prompts(engine, temperature=1.0, tokens=60)
    assert drain(engine) == drawn_alone(make_engine, temperature=1.0, tokens=60)
    assert engine.speculator is not None and not engine.speculator.dropped
    assert sum(len(tokens) for _, _, tokens, _ in spy.seen) > 100
    assert engine.manager.available == 9


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_drafts_are_drawn_with_the_noise_of_the_target(
    make_engine: Callable[..., Engine],
    tiny: DecoderModel,
    tmp_path: Path,
    reference: Reference,
    kind: str,
) -> None:
    """A head that says the target's feature again proposes what the target would draw from the same
    logits one position later."""
    engine = make_engine()
    texts = drawn_alone(make_engine, temperature=0.6)
    h = tiny.config.hidden_size
    if kind == "medusa":
        state = {"0.0.linear.weight": torch.zeros(h, h), "0.0.linear.bias": torch.zeros(h)}
        folder = write(tmp_path, state, {"medusa_num_heads": 1})
        proposer: Proposer = MedusaProposer(tiny, engine.state, folder)
    else:
        state = eagle_state(tiny, bias=False)
        state["fc.weight"] = torch.cat([torch.zeros(h, h), torch.eye(h)], 1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            state[f"layers.0.{name}.weight"] *= 0.0
        folder = write(tmp_path, state, EAGLE_CONFIG)
        proposer = EagleProposer(tiny, engine.state, folder, engine.config.pages)
    spy = speculate(engine, proposer, 1)
    prompts(engine, temperature=0.6)
    assert drain(engine) == texts
    met = compared = 0
    for prompt, text, tokens, parents in spy.seen:
        if not tokens:
            continue
        assert parents == [ROOT]
        handle = next(i for i, n in enumerate((5, 33, 70, 1)) if n == len(prompt))
        logits = reference.read(reference.features(text)[-2])
        expected = _draw(logits, handle, len(text))
        met += tokens[0] == expected
        compared += 1
    assert compared > 40
    assert met > 0.9 * compared  # noise is added to the likeliest tokens only


def _draw(logits: Tensor, seed: int, position: int) -> int:
    every = torch.arange(len(logits))
    noise = gumbel_noise(torch.tensor([noise_key(seed, 0)]), torch.tensor([position]), every)[0]
    return int((logits.double() / 0.6 + noise).argmax())
