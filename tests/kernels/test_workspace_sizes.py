"""What the estimate of a GPU's memory takes over from kernels and recorded steps.

The estimate imports no torch, so it repeats their numbers and bounds.
"""

from __future__ import annotations

import pytest
import torch

from engine.execution import decode_graphs
from engine.ipc.settings import StepSizes
from engine.kernels import paged_rows, recording, sampling
from engine.kernels.paged_rows import piece_count
from engine.kernels.recording import RUN_ROWS, GraphSizes, prompt_graph_sizes
from engine.memory import workspace
from engine.memory.workspace import GpuWork, gpu_workspace_parts, most_graphs
from engine.scheduling.sequence import blocks_for
from engine.speculation.draft_source import DraftSize
from engine.speculation.proposers import draft_passes
from protocol.block_keys import BLOCK_TOKENS
from tests.engine.execution.llama_3_8b import LLAMA_3_8B


def graph_sizes(max_batch: int, max_len: int) -> GraphSizes:
    longest = piece_count((blocks_for(max_len) + 1) * BLOCK_TOKENS)
    return GraphSizes(max_batch, longest, 32 * 128 * 4)


def test_pieces_and_recorded_rows_are_those_of_the_kernels() -> None:
    assert workspace.PIECE_TOKENS == paged_rows.PIECE_TOKENS
    assert workspace.RECORDED_ROWS == recording.MOST_DRAFTED_ROWS
    assert recording.PROMPT_ROWS[-1] == workspace.PROMPT_ROWS
    assert RUN_ROWS == workspace.RUN_ROWS
    assert workspace.MOST_PARTIAL_BYTES == recording.MOST_PARTIAL_BYTES


@pytest.mark.parametrize("max_len", [64, 4096, 8192, 131072])
@pytest.mark.parametrize("max_batch", [1, 7, 64, 256, 300, 1000])
@pytest.mark.parametrize(
    ("rows", "drafted_shapes"),
    [
        (decode_graphs.ROWS[:1], 0),
        (decode_graphs.ROWS, workspace.DRAFTED_SHAPES),
        (draft_passes.ROWS, workspace.PASS_SHAPES),
    ],
)
def test_no_more_graphs_are_recorded_than_counted(
    max_batch: int, max_len: int, rows: tuple[int, ...], drafted_shapes: int
) -> None:
    count = len(graph_sizes(max_batch, max_len).of_rows(rows))
    assert count <= most_graphs(max_len, drafted_shapes)
    if max_batch == 256 and max_len >= 8192:
        assert most_graphs(max_len, drafted_shapes) < 2 * count


@pytest.mark.parametrize("max_len", [64, 4096, 131072])
@pytest.mark.parametrize("step_rows", [40, 600, 4096])
def test_graphs_of_steps_with_prompts_are_as_many_and_as_large_as_counted(
    max_len: int, step_rows: int
) -> None:
    longest = piece_count((blocks_for(max_len) + 1) * BLOCK_TOKENS)
    sizes = prompt_graph_sizes(step_rows, 20, longest, 32 * 128 * 4)
    assert len(sizes) <= workspace.PROMPT_GRAPHS
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)
    assert sizes[-1].rows >= min(step_rows, workspace.PROMPT_ROWS)
    runs = 20 + 768 // RUN_ROWS
    counted = min(runs * RUN_ROWS * longest * 32 * 129 * 4, (256 << 20) * 129 // 128)
    assert max(size.pieces for size in sizes) * RUN_ROWS * 32 * 129 * 4 <= counted
    # One piece at least of all sequences, and of a prompt that has the other rows.
    assert sizes[-1].pieces >= 20 + (sizes[-1].rows - 20) // RUN_ROWS


@pytest.mark.parametrize("max_len", [64, 4096, 131072])
@pytest.mark.parametrize("max_batch", [1, 256])
@pytest.mark.parametrize("drafts", [0, 8])
def test_partial_results_of_recorded_steps_fit(max_len: int, max_batch: int, drafts: int) -> None:
    """A graph allocates the results of all its pieces for all its rows of a sequence."""
    work = GpuWork(
        config=LLAMA_3_8B,
        sizes=StepSizes(max_batch, 2048),
        element=2,
        max_len=max_len,
        draft=DraftSize(drafts),
        staging=0,
    )
    counted = gpu_workspace_parts(work).graphs.step
    counted -= 256 * (128256 * 4 + 4096 * 2) + 768 * 4096 * 2  # buffers
    row, step_rows = 6 * 4096 + 3 * 14336, 256 if drafts else max_batch
    counted -= max(step_rows * (row + 128256), 768 * row) * 2  # the rest of the step
    graphs = most_graphs(max_len, workspace.DRAFTED_SHAPES if drafts else 0)
    counted -= (graphs + workspace.PROMPT_GRAPHS) << 20
    rows = decode_graphs.ROWS if drafts else decode_graphs.ROWS[:1]
    sizes = graph_sizes(max_batch, max_len).of_rows(rows)
    largest = max(size.pieces * size.rows for size in sizes)
    longest = piece_count((blocks_for(max_len) + 1) * BLOCK_TOKENS)
    prompts = prompt_graph_sizes(4096, max_batch, longest, 32 * 128 * 4)
    largest = max(largest, *(size.pieces * RUN_ROWS for size in prompts)) * 32 * 129 * 4
    assert largest <= counted < 2 * largest


def test_draws_take_what_is_counted() -> None:
    own = sampling.DrawWorkspace(10, 128256, torch.device("cpu"))
    size = sum(t.nbytes for t in (own.scores, own.tokens, own.drawn))
    assert size == 10 * (126 * 12 + 8)
