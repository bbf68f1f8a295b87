"""Steps with prompts in graphs draw the texts of the CPU, and their rows are divided into runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batching.prompt_runs import RunRows, count_pieces, pool_slots
from engine.execution.engine import Engine
from engine.execution.prompt_graphs import PromptGraphs
from engine.kernels import recording
from engine.kernels.attention import rows_of_runs
from engine.kernels.recording import RUN_ROWS
from engine.kv_cache.kv_format import Storage
from engine.scheduling.sequence import Phase, Sequence
from engine.scheduling.step_policy import StepPlan
from engine.speculation.control.draft_lengths import FixedDraftLength
from engine.speculation.control.speculator import Speculator
from engine.speculation.proposers.ngram import NgramProposer
from protocol.performance.step_model import StepWork
from tests.engine.conftest import drain, request
from tests.engine.families import save
from tests.kernels.test_engine import SMALL, engine


def sequence(handle: int, tokens: int, computed: int) -> Sequence:
    made = Sequence(handle, request("r", list(range(1000, 1000 + tokens))), Phase.PREFILL)
    made.row, made.computed = handle + 10, computed
    made.pages = [100 * handle + i for i in range(-(-tokens // 32))]
    return made


def test_rows_are_divided_into_runs_of_one_sequence_each() -> None:
    decoding, whole, part = sequence(1, 300, 299), sequence(2, 20, 0), sequence(3, 700, 500)
    chunks = ((whole, 20), (part, 33))
    plan = StepPlan((decoding,), chunks, StepWork(1, 300, 53))
    rows = RunRows.of(plan, 16)
    assert count_pieces(plan, 16) == rows.pieces.sum()
    assert rows.row_count.tolist() == [1, 16, 4, 16, 16, 1]
    assert rows.known.tolist() == [299, 0, 16, 500, 516, 532]
    assert rows.state_row.tolist() == [11, 12, 12, 13, 13, 13]
    assert rows.positions.tolist() == [299, *range(20), *range(500, 533)]
    assert rows.tokens.tolist() == [1299, *range(1000, 1020), *range(1500, 1533)]
    assert rows.slots.tolist() == [
        109 * 32 + 11,
        *range(200 * 32, 200 * 32 + 20),
        *range(315 * 32 + 20, 316 * 32 + 21),
    ]
    assert rows.owner.tolist() == np.repeat(np.arange(6), rows.row_count).tolist()
    assert rows.ancestors[1:5].tolist() == [1, 3, 7, 15] and rows.ancestors[0] == 1
    assert rows.logit_rows.tolist() == [0, 20]  # the second prompt goes on
    assert rows.drawing.tolist() == [11, 12]
    items, starts = rows.piece_items()
    assert rows.pieces.tolist() == [2, 1, 1, 3, 3, 3]
    assert starts.tolist() == [0, 2, 3, 4, 7, 10]
    assert items.tolist() == [r << 32 | p for r, n in enumerate(rows.pieces) for p in range(n)]


@pytest.mark.parametrize(("first", "end"), [(0, 1), (31, 33), (64, 65), (5, 70)])
def test_slots_are_those_of_the_pages(first: int, end: int) -> None:
    own = sequence(1, 70, 0)
    expected = [own.pages[i // 32] * 32 + i % 32 for i in range(first, end)]
    assert pool_slots(own, first, end).tolist() == expected


@pytest.mark.parametrize(
    ("group", "head_dim", "element", "rows"),
    [
        *((1, 128, 2, 16), (4, 128, 2, 16), (7, 128, 2, 16), (8, 128, 2, 16), (2, 256, 2, 16)),
        *((16, 128, 2, 8), (32, 128, 2, 4), (8, 256, 2, 8), (4, 128, 4, 16), (8, 128, 4, 8)),
    ],
)
def test_runs_are_as_long_as_a_multiprocessor_has_room_for(
    group: int, head_dim: int, element: int, rows: int
) -> None:
    assert rows_of_runs(RUN_ROWS, group, head_dim, element) == rows
    assert rows_of_runs(RUN_ROWS, 1000, head_dim, element) == 1


def texts(own: Engine) -> dict[int, list[Any]]:
    """Chunks beside decoding sequences, of a prompt that is longer than a chunk, and a prompt whose
    beginning is cached. The ranks of prompt tokens and the likeliest ones go into the text."""
    drawn: dict[int, list[Any]] = {}
    more: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 1}, {"prompt_logprobs": 1}]
    for handle, length in enumerate((3, 90, 31)):
        prompt = [3 + (handle * 7 + i * i) % 300 for i in range(length)]
        own.generate(handle, request(f"r{handle}", prompt, max_tokens=6, **more[handle]))
    for token in (t for _ in range(4) for t in own.run(own.plan())):
        drawn.setdefault(token.handle, []).append(token.token)
        drawn[token.handle] += [(each.rank, each.top_tokens) for each in token.prompt_logprobs]
    assert len(drawn[2]) >= 30, "of the prompt's tokens but the first one"
    again = [3 + (7 + i * i) % 300 for i in range(70)]
    own.generate(9, request("again", again, max_tokens=4))
    for handle, tokens in drain(own).items():
        drawn.setdefault(handle, []).extend(tokens)
    return drawn


@pytest.mark.usefixtures("few_padded_rows")
@pytest.mark.parametrize(
    ("family", "storage"),
    [("llama", "fp8"), pytest.param("gemma2", "wide", marks=pytest.mark.long)],
)
def test_steps_with_prompts_draw_the_texts_of_the_cpu(
    family: str, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: dict[str, Any] = {**SMALL, "num_hidden_layers": 1}
    if family == "gemma2":
        layers = ["sliding_attention", "full_attention"]
        model |= {"num_hidden_layers": 2, "layer_types": layers}
    folder = save(tmp_path, family, **model)
    expected = texts(engine(folder, kernels=False, kv_precision="fp8"))
    own = engine(folder, kernels=True, storage=storage, kv_precision="fp8", max_batch=4, pages=16)
    own.record_graphs(lambda _: None)
    ran: list[bool] = []
    size_for = PromptGraphs.size_for

    def noted(self: PromptGraphs, plan: StepPlan) -> Any:
        size = size_for(self, plan)
        ran.append(size is not None)
        return size

    monkeypatch.setattr(PromptGraphs, "size_for", noted)
    assert texts(own) == expected
    assert len(ran) >= 5 and all(ran)


def test_a_step_that_fits_no_graph_is_computed_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "PROMPT_ROWS", (16,))
    model: dict[str, Any] = {**SMALL, "num_hidden_layers": 1}
    folder = save(tmp_path, "llama", **model)

    def run(own: Engine) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        for handle, length in enumerate((40, 9)):
            prompt = [3 + i % 200 for i in range(length)]
            own.generate(handle, request(f"r{handle}", prompt, max_tokens=1))
            out.update(drain(own))
        return out

    own = engine(folder, kernels=True, chunk=64, pages=4, max_batch=1)
    own.record_graphs(lambda _: None)
    assert run(own) == run(engine(folder, kernels=False))


def test_a_step_with_a_graph_gets_no_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 40 prompt tokens, which fit no graph here, the sequence that decodes has drafts."""
    monkeypatch.setattr(recording, "PROMPT_ROWS", (16,))
    folder = save(tmp_path, "llama", **{**SMALL, "num_hidden_layers": 1})
    own = engine(folder, kernels=True, chunk=64, pages=12, max_batch=2)
    own.speculate(Speculator(NgramProposer(4), FixedDraftLength(4), 320))
    own.record_graphs(lambda _: None)
    own.generate(1, request("first", [3 + i % 3 for i in range(9)], max_tokens=60))
    own.run(own.plan())
    drafts = {}
    for handle, length in enumerate((9, 40), 2):
        assert any(own.plan().draft_nodes)
        prompt = [100 + handle + i for i in range(length)]
        own.generate(handle, request(f"r{handle}", prompt, max_tokens=1))
        plan = own.plan()
        assert plan.chunks and plan.decode
        drafts[length] = sum(plan.draft_nodes)
        own.run(plan)
    assert drafts == {9: 0, 40: 4}
