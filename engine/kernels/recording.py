"""Records computations as CUDA graphs, and knows for which sizes there is one.

A graph reads the same memory in every replay and has a fixed number of rows, so a step runs in the
smallest graph that is large enough. The engine's decode steps, its steps with few prompt tokens,
and the passes of a draft model are recorded.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from protocol.garbage_collection import without_garbage_collection

SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512)
"""Numbers of sequences of graphs. A product with few more rows costs hardly more time."""

MOST_DRAFTED_ROWS = 256
"""Rows of a graph with several rows a sequence: a step has at most as many draft nodes."""


PROMPT_ROWS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768)
"""Rows of graphs of steps with prompts. With more, a GPU computes for longer than the host needs
for its launches: for Llama-3-8B these take 15 to 30 ms, and on an H200 768 rows take 20 ms."""

RUN_ROWS = 16
"""Rows of a run of consecutive prompt tokens in these, at most. More would read the KV of a prompt
less often, and leave fewer programs for its attention. Models with many query heads for each KV
head have shorter runs (``rows_of_runs`` in engine/kernels/attention.py)."""

PROMPT_PIECES = (32, 128, 512)
"""Pieces of their contexts, besides as many as have room."""

MOST_PARTIAL_BYTES = 256 << 20
"""Bytes of the partial results of attention in a graph. Steps with longer contexts run without one.
For Llama-3-8B these are 4 million tokens without drafts. With a prompt, every sequence takes the
results of a whole run, so these are 262,144 tokens: of 64 sequences, 4,096 each."""


class Recording(Protocol):
    """A recorded computation."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Runs a computation and records it."""

    def __call__(self, compute: Callable[[], None]) -> Recording: ...


class CudaRecorder:
    """Records CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], None]) -> Recording:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # The first run compiles kernels and lets libraries allocate, which cannot be recorded.
            compute()
            # Not torch.cuda.graph: it collects garbage, which takes longer than the recording.
            # Other threads may use CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one to report
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return _CudaRecording(graph, compute)


class _CudaRecording:
    """A CUDA graph with its computation, whose tensors are those that the graph reads."""

    def __init__(self, graph: torch.cuda.CUDAGraph, compute: Callable[[], None]) -> None:
        self._graph = graph
        self._compute = compute

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def recording_session(device: torch.device) -> Iterator[None]:
    """Record graphs within it. Garbage is not collected meanwhile, because freeing memory of CUDA
    breaks a recording, and memory that only the first runs needed is freed afterwards."""
    try:
        with without_garbage_collection():
            yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


class DirectCall:
    """A recorder for devices without graphs: a replay computes again."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = compute


def make_recorder(device: torch.device) -> Recorder:
    """Return a recorder of computations on ``device``."""
    return CudaRecorder() if device.type == "cuda" else DirectCall


class GraphSize(NamedTuple):
    """What a graph is made for: at most so many sequences and pieces, exactly so many rows each."""

    rows: int
    sequences: int
    pieces: int


class GraphSizes:
    """The sizes of graphs for up to ``sequences`` sequences, whose contexts have up to ``longest``
    pieces each. A piece takes ``piece_bytes`` of partial results for each row of a sequence."""

    def __init__(self, sequences: int, longest: int, piece_bytes: int) -> None:
        self.most_sequences = sequences
        self._most_partial = MOST_PARTIAL_BYTES // piece_bytes  # pieces times rows of a sequence
        self.most_pieces = min(sequences * longest, self._most_partial)
        self._longest = longest
        # By rows of a sequence: the sequences of graphs, and by these the pieces, both ascending.
        self._known: dict[int, dict[int, list[int]]] = {}

    def of_rows(self, rows: Sequence[int]) -> list[GraphSize]:
        """Return all sizes with these ``rows`` a sequence, the largest first, so that later graphs
        find their memory in the pool."""
        most = self.most_sequences
        sequences = sorted({min(n, most) for n in SEQUENCES} | {most})
        sizes = [
            GraphSize(n, s, p)
            for n in rows
            for s in sequences
            if n == 1 or s * n <= MOST_DRAFTED_ROWS
            for p in self._piece_bounds(s, self._most_partial // n, 2 if n == 1 else 4)
        ]
        return sorted(sizes, key=lambda size: (size.pieces, size.sequences * size.rows))[::-1]

    def _piece_bounds(self, sequences: int, most: int, factor: int) -> list[int]:
        """Return bounds that grow by ``factor``, from one piece for each sequence up to ``most``,
        or what these sequences can have."""
        most = min(most, sequences * self._longest)
        bound = max(8, sequences)
        bounds = []
        while bound * 1.1 < most:
            bounds.append(bound)
            bound *= factor
        return [*bounds, most]

    def add(self, sizes: Sequence[GraphSize]) -> None:
        """Add the sizes of graphs that were recorded."""
        for n, s, p in sorted(sizes):
            self._known.setdefault(n, {}).setdefault(s, []).append(p)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of a sequence that recorded graphs have, in ascending order."""
        return tuple(self._known)

    def find(
        self, rows: int, sequences: int, pieces: int, *, widest: bool = False
    ) -> GraphSize | None:
        """Return the smallest recorded size with exactly ``rows`` rows a sequence for so many
        ``sequences`` and ``pieces``; None: there is none. ``widest``: of those with the most
        sequences."""
        known = self._known.get(rows, {})
        for most, bounds in list(known.items())[-1:] if widest else known.items():
            if most >= sequences and bounds[-1] >= pieces:
                return GraphSize(rows, most, bounds[bisect_left(bounds, pieces)])
        return None

    def rows_computed(
        self, sequences: int, drafts: int, pieces: int, *, widest: bool = False
    ) -> int:
        """Return the rows of the smallest recorded size for ``sequences`` with up to ``drafts``
        each, over at most ``pieces``. Where there is none, return more rows than any recorded step
        with drafts has: without a graph a step takes as long as one of these."""
        rows = next((n for n in self.rows if n > drafts), 0)
        pieces = min(pieces, sequences * self._longest)
        size = self.find(rows, sequences, pieces, widest=widest)
        if size is None:
            return max(sequences * (1 + drafts), 2 * MOST_DRAFTED_ROWS)
        return size.rows * size.sequences


class PromptGraphSize(NamedTuple):
    """What a graph of a step with prompts is made for: at most so many rows and pieces."""

    rows: int
    pieces: int


def prompt_graph_sizes(
    most_rows: int, sequences: int, longest: int, row_bytes: int, run_rows: int = RUN_ROWS
) -> list[PromptGraphSize]:
    """Return the sizes of graphs for steps of up to ``most_rows`` rows, in ascending order. Up to
    ``sequences`` have contexts of up to ``longest`` pieces each. A row takes ``row_bytes`` of
    partial results in each piece, and a run has up to ``run_rows`` of them."""
    needed = next((n for n in PROMPT_ROWS if n >= most_rows), PROMPT_ROWS[-1])
    sizes = []
    for rows in PROMPT_ROWS[: PROMPT_ROWS.index(needed) + 1]:
        runs = min(rows, sequences + rows // run_rows)
        most = min(runs * longest, MOST_PARTIAL_BYTES // (run_rows * row_bytes))
        bounds = [n for n in PROMPT_PIECES if n * 1.1 < most]
        sizes += [PromptGraphSize(rows, pieces) for pieces in (*bounds, most)]
    return sizes
