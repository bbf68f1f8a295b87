"""A draft model computed by kernels and in graphs proposes the tokens of the CPU's draft model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.lib.engines import engine_config
from engine.execution.engine import Engine
from engine.kernels.fp8 import INTERPRETED
from engine.model.decoder import DecoderModel
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.scheduling.sequence import Sequence as Running
from engine.scheduling.step_policy import plan_decode_step
from engine.speculation.control.draft_lengths import FixedDraftLength
from engine.speculation.control.speculator import Speculator
from engine.speculation.drafts import Drafts
from engine.speculation.proposers import draft_passes
from engine.speculation.proposers.draft_model import DraftModel
from engine.speculation.proposers.proposer import Proposer
from tests.engine.conftest import drain, request
from tests.engine.families import save
from tests.engine.proposers import RandomDraft
from tests.engine.speculating import RandomLengths
from tests.kernels.test_launches import counted

POSITIONS, MOST, VOCAB = 512, 4, 320
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": VOCAB}
SIZES: dict[str, Any] = {"pages": 16, "max_batch": 3, "chunk": 32, "max_model_len": POSITIONS}
KIND: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {"temperature": 0.2, "seed": 3}, {"temperature": 0.15, "seed": 4}],
    "filters": [{}, {"temperature": 0.9, "top_p": 0.8, "seed": 5}, {"temperature": 0.2}],
}


def model(folder: Path, *, kernels: bool) -> DecoderModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_config(folder)
    weights = load_weights(folder, config, torch.float32, device)
    return DecoderModel(config, weights, POSITIONS, kernels=kernels)


def folders(tmp_path: Path, family: str = "llama", noise: float = 0.01) -> tuple[Path, Path]:
    """Return a target, and a draft that is often right: the target with changed weights."""
    target, draft = (save(tmp_path / name, family, **SMALL) for name in ("target", "draft"))
    torch.manual_seed(1)
    weights = load_file(target / "model.safetensors")
    changed = {name: w + noise * torch.randn_like(w) for name, w in weights.items()}
    save_file(changed, draft / "model.safetensors", metadata={"format": "pt"})
    return target, draft


def draft_model(engine: Engine, folder: Path, *, kernels: bool, chunk: int = 64) -> DraftModel:
    own = model(folder, kernels=kernels)
    pages = engine.config.pages
    sizes = {"pages": pages, "positions": POSITIONS, "most": MOST, "chunk": chunk}
    return DraftModel(own, engine.state, **sizes)


class Compared(Proposer):
    """Proposes with two draft models and asserts that their drafts are equal."""

    name = "compared"
    most = MOST

    def __init__(self, expected: DraftModel, ours: DraftModel) -> None:
        self._expected, self._ours = expected, ours
        self.most_fresh = 0  # tokens of a sequence without KV, beyond which it is caught up first
        draw = ours._runner.draw

        def watched(ready: Any, rows: Tensor) -> Tensor:
            fresh = [len(r.sequence.tokens) - r.known for r in ready]
            self.most_fresh = max(self.most_fresh, *fresh)
            return draw(ready, rows)

        ours._runner.draw = watched  # type: ignore[method-assign]

    def passes(self, nodes: int) -> int:
        return nodes

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        expected = self._expected.propose(sequences, rows, wanted)
        ours = self._ours.propose(sequences, rows, wanted)
        assert list(ours.counts) == list(expected.counts)
        assert ours.tokens.tolist() == expected.tokens.tolist()
        return ours

    def forget(self, leases: Sequence[int]) -> None:
        self._expected.forget(leases)
        self._ours.forget(leases)


def run_arrivals(engine: Engine, kinds: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Run four requests that join and leave at different steps."""
    out: dict[int, list[int]] = {}
    lengths = [3, 50, 31, 9]
    for step in range(200):
        if step % 3 == 0 and step // 3 < len(lengths):
            handle = step // 3
            prompt = [3 + (handle * 7 + i * i) % 300 for i in range(lengths[handle])]
            own = kinds[handle % len(kinds)]
            engine.generate(
                handle, request(f"r{handle}", prompt, max_tokens=9 + 5 * (handle % 3), **own)
            )
        plan = engine.plan()
        if not plan and step > 3 * len(lengths):
            return out
        for token in engine.run(plan) if plan else ():
            out.setdefault(token.handle, []).append(token.token)
    raise AssertionError("not done after 200 steps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares with the CPU's draft model")
@pytest.mark.parametrize(
    ("kind", "family", "recorded"),
    [
        pytest.param("plain", "llama", True, marks=pytest.mark.long),
        pytest.param("plain", "mistral", False, marks=pytest.mark.long),
        ("filters", "qwen3", True),
    ],
)
def test_drafts_are_those_of_the_cpu(
    kind: str, family: str, recorded: bool, tmp_path: Path
) -> None:
    target, draft = folders(tmp_path, family)
    plain = Engine(model(target, kernels=False), engine_config(**SIZES), plan_decode_step)
    engine = Engine(model(target, kernels=False), engine_config(**SIZES), plan_decode_step)
    ours = draft_model(engine, draft, kernels=True)
    if recorded:
        ours.record_graphs(lambda _: None)
    compared = Compared(draft_model(engine, draft, kernels=False), ours)
    speculator = Speculator(compared, RandomLengths(MOST), VOCAB)
    engine.speculate(speculator)
    assert run_arrivals(engine, KIND[kind]) == run_arrivals(plain, KIND[kind])
    assert speculator.dropped == ""
    assert compared.most_fresh > 2
    counts = engine.scheduler.counters.speculation
    assert 0.3 < counts.accepted_tokens / counts.draft_tokens < 1.0
    assert counts.accepted_tokens > 10


def test_texts_with_drafts_in_graphs_are_those_without(tmp_path: Path) -> None:
    target, draft = folders(tmp_path)
    plain = Engine(model(target, kernels=True), engine_config(**SIZES), plan_decode_step)
    engine = Engine(model(target, kernels=True), engine_config(**SIZES), plan_decode_step)
    proposer = draft_model(engine, draft, kernels=True)
    speculator = Speculator(proposer, FixedDraftLength(3), VOCAB)
    engine.speculate(speculator)
    engine.record_graphs(lambda _: None)

    def texts(own: Engine) -> dict[int, list[int]]:
        for handle, kind in enumerate(KIND["plain"]):
            own.generate(handle, request(f"r{handle}", [5, 6, 7 + handle], max_tokens=9, **kind))
        return drain(own)

    assert texts(engine) == texts(plain)
    assert speculator.dropped == ""
    assert proposer._runner._passes._graphs  # type: ignore[union-attr]
    freed = weakref.ref(proposer._runner._model)
    del proposer
    speculator._drop(RuntimeError("no more drafts"))
    assert freed() is None  # without waiting for a collection of garbage
    assert engine.scheduler.counters.speculation.accepted_tokens > 6


class CountedGraphs:
    """Records graphs that compute nothing, and counts their replays."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, compute: Callable[[], None]) -> CountedGraphs:
        return self

    def replay(self) -> None:
        self.replays += 1


@pytest.mark.skipif(not INTERPRETED, reason="counts the launches of Triton's interpreter")
@pytest.mark.parametrize("fresh", [1, 2])
def test_a_draft_token_is_one_graph_and_no_wait(
    fresh: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = CountedGraphs()
    monkeypatch.setattr(draft_passes, "make_recorder", lambda _: graphs)
    _, draft = folders(tmp_path)
    engine = Engine(model(draft, kernels=False), engine_config(**SIZES), plan_decode_step)
    proposer = draft_model(engine, draft, kernels=True)
    proposer.record_graphs(lambda _: None)
    for handle, kind in enumerate(KIND["plain"]):
        engine.generate(handle, request(f"r{handle}", [5, 6, 7], max_tokens=90, **kind))
    while len(engine.scheduler.decoding) < 3:
        engine.run(engine.plan())
    sequences = list(engine.scheduler.decoding)
    rows = torch.tensor([s.row for s in sequences])
    proposer.propose(sequences, rows, [2] * 3)
    found = {}
    for nodes in (1, 4):
        for _ in range(fresh):
            engine.run(engine.plan())
        graphs.replays = 0
        with counted(monkeypatch) as (launches, waits):
            proposer.propose(sequences, rows, [nodes] * 3)
        print(f"\n{nodes} drafts: {graphs.replays} graphs, {dict(launches)}\nwaits: {dict(waits)}")
        assert graphs.replays == nodes
        found[nodes] = graphs.replays + launches.total()
        assert waits.total() == 0
    assert (found[4] - found[1]) / 3 <= 2
    assert found[1] <= 12


def test_a_proposer_that_cannot_be_recorded_is_dropped() -> None:
    class Unrecordable(RandomDraft):
        def record_graphs(self, progress: Callable[[float], None]) -> None:
            progress(0.0)
            raise MemoryError("no memory for graphs")

    speculator = Speculator(Unrecordable(VOCAB, MOST), FixedDraftLength(2), VOCAB)
    reported: list[float] = []
    speculator.record_graphs(reported.append)
    assert reported == [0.0]
    assert speculator.proposer is None
    assert speculator.dropped == "MemoryError: no memory for graphs"
    plain = Speculator(RandomDraft(VOCAB, MOST), FixedDraftLength(2), VOCAB)
    plain.record_graphs(reported.append)
    assert plain.dropped == ""
