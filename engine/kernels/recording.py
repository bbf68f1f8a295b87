"""Records computations as CUDA graphs, and knows for which sizes there is one.

A graph reads the same memory in every replay and has a fixed number of rows, so a step runs in the
smallest graph that is large enough. The engine's decode steps and the passes of a draft model are
recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512)
"""Numbers of sequences of graphs. A product with few more rows costs hardly more time."""

MOST_DRAFTED_ROWS = 256
"""Rows of a graph with several rows a sequence: a step has at most as many draft nodes."""


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
            graph.capture_begin(pool=self._pool)
            compute()
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph


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
    """The sizes of graphs for up to ``sequences`` sequences. Their contexts have up to ``pieces``
    pieces in total and up to ``longest`` pieces each."""

    def __init__(self, sequences: int, pieces: int, longest: int) -> None:
        self.most_sequences, self.most_pieces = sequences, pieces
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
            for p in self._piece_bounds(s, 2 if n == 1 else 4)
        ]
        return sorted(sizes, key=lambda size: (size.pieces, size.sequences * size.rows))[::-1]

    def _piece_bounds(self, sequences: int, factor: int) -> list[int]:
        """Return bounds that grow by ``factor``, from one piece for each sequence up to what the
        pool holds."""
        most = min(self.most_pieces, sequences * self._longest)
        bound = max(8, sequences)
        bounds = []
        while bound < most:
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

    def find(self, rows: int, sequences: int, pieces: int) -> GraphSize | None:
        """Return the smallest recorded size with exactly ``rows`` rows a sequence for so many
        ``sequences`` and ``pieces``; None: there is none."""
        for most, bounds in self._known.get(rows, {}).items():
            if most >= sequences and bounds[-1] >= pieces:
                return GraphSize(rows, most, bounds[bisect_left(bounds, pieces)])
        return None
