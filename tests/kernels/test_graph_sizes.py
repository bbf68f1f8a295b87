"""Which sizes of recorded steps there are, and how many rows a step computes in them."""

from __future__ import annotations

import pytest

from engine.execution.decode_graphs import ROWS
from engine.kernels.recording import MOST_DRAFTED_ROWS, GraphSizes


@pytest.fixture
def recorded() -> GraphSizes:
    """All sizes for 64 sequences of up to 32 pieces, with drafts."""
    sizes = GraphSizes(64, 32, 16 << 10)
    sizes.add(sizes.of_rows(ROWS))
    return sizes


@pytest.mark.parametrize(
    ("sequences", "drafts", "rows"),
    [
        (1, 0, 1),
        (17, 0, 24),  # the next number of sequences
        (16, 1, 32),
        (16, 4, 128),  # room for seven drafts of each
        (16, 8, 256),
        (64, 3, 256),
    ],
)
def test_every_sequence_has_the_same_rows(
    recorded: GraphSizes, sequences: int, drafts: int, rows: int
) -> None:
    assert recorded.rows_computed(sequences, drafts, sequences) == rows


@pytest.mark.parametrize(("sequences", "drafts"), [(17, 8), (64, 4), (65, 1), (1, 16)])
def test_steps_without_a_graph_have_more_rows_than_any_with_drafts(
    recorded: GraphSizes, sequences: int, drafts: int
) -> None:
    assert recorded.rows_computed(sequences, drafts, sequences) >= 2 * MOST_DRAFTED_ROWS


def test_batch_invariant_steps_have_the_most_sequences(recorded: GraphSizes) -> None:
    assert recorded.rows_computed(3, 0, 3, widest=True) == 64
    assert recorded.rows_computed(3, 2, 3, widest=True) == 256


def test_long_contexts_have_no_graph_with_many_rows() -> None:
    """Partial results of attention take 256 MiB at most."""
    sizes = GraphSizes(64, 128, 16 << 10)
    sizes.add(sizes.of_rows(ROWS))
    assert sizes.rows_computed(32, 7, 2048) == 256
    assert sizes.rows_computed(32, 7, 2049) >= 2 * MOST_DRAFTED_ROWS
    assert sizes.rows_computed(2, 0, 10_000) == 2, "two sequences have no more than 256 pieces"
