"""A small model of the same vocabulary as a proposer (Leviathan et al., 2023; Chen et al., 2023).

    catch up   whose prompt or text the draft has not seen: in chunks, some at a time
    pass 1     all that came since the last proposal, one or two tokens of each
    pass 2 ..  the token just drawn, of those that want more

Its KV lies in a pool of its own under the target's page numbers: a token has the same slot in both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.batching.row_state import RowState
from engine.model.decoder import DecoderModel, warm_up_products
from engine.model.linear import make_draft_linear
from engine.model.weights import load_weights
from engine.model_config.checkpoint import load_config
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.draft_source import check_vocabularies
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.draft_runner import DraftModelRunner, DraftRequest
from engine.speculation.proposers.proposer import VerifiedStep
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError

# MERGED engine.speculation.draft_known
# Which tokens of whom have the draft model's KV. Torch-free.
#
# The draft's pool has the target's page numbers, and nobody is asked before a page changes hands:
# what is in it is known by who wrote it last, and what for.
#
#     text        t0 ... t31 | t32 ... t63 | t64 t65 t66
#     page        p          | q           | r
#     writer      3            9             9             the stay that wrote last
#     key         K0           K1            -             of the block that is whole, once it has
#     one


@dataclass
class _DraftKvState:
    tokens: int = 0  # leading tokens of the text whose KV is there
    blocks: int = 0  # leading blocks of these that are known by their keys
    start: int = 0  # of what was guessed beyond the text
    guessed: Sequence[int] = field(default_factory=tuple)  # and is there, if it came true


class DraftKvIndex:
    """Counts KV by stay and by page. Wrong where somebody else writes to the pool."""

    def __init__(self, pages: int) -> None:
        self._writer = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._stays: dict[int, _DraftKvState] = {}

    def tokens(self, sequence: Running) -> int:
        """Leading tokens of ``sequence`` whose KV is in the pool."""
        stay = self._stays.get(sequence.row_lease)
        if stay is None:
            stay = self._stays[sequence.row_lease] = _DraftKvState()
        if stay.guessed:
            self._resolve(sequence, stay)
        if stay.blocks < sequence.committed:
            self._look(sequence, stay)
        return stay.tokens

    def _resolve(self, sequence: Running, stay: _DraftKvState) -> None:
        """Keep what came true, on pages that have not been given back meanwhile."""
        came = _common(sequence.tokens, stay.start, stay.guessed)
        stay.tokens, stay.guessed = stay.start + came, ()
        for block in range(stay.start // BLOCK_TOKENS, -(-stay.tokens // BLOCK_TOKENS)):
            if self._writer[sequence.pages[block]] != sequence.row_lease:
                stay.tokens = min(stay.tokens, max(stay.start, block * BLOCK_TOKENS))

    def _look(self, sequence: Running, stay: _DraftKvState) -> None:
        """At the blocks that have got a key since: a page may have been replaced by another one of
        the same key, and may hold what another stay computed."""
        for block in range(stay.blocks, sequence.committed):
            page, key = sequence.pages[block], sequence.keys[block]
            end = (block + 1) * BLOCK_TOKENS
            if self._writer[page] == sequence.row_lease and end <= stay.tokens:
                self._key[page] = key
            elif self._key[page] == key:
                stay.tokens = max(stay.tokens, end)
            else:
                if self._writer[page] != sequence.row_lease:
                    stay.tokens = min(stay.tokens, end - BLOCK_TOKENS)
                return
            stay.blocks = block + 1

    def write(self, sequence: Running, tokens: int, guesses: int = 0) -> None:
        """The KV of the first ``tokens`` tokens of its text is there with this step, and that of
        ``guesses`` tokens that may follow the text, to be told by ``guess``."""
        stay = self._stays[sequence.row_lease]
        for block in range(stay.tokens // BLOCK_TOKENS, -(-(tokens + guesses) // BLOCK_TOKENS)):
            page = sequence.pages[block]
            self._writer[page], self._key[page] = sequence.row_lease, None
        stay.tokens = tokens
        self._look(sequence, stay)

    def guess(self, seating: int, tokens: Sequence[int]) -> None:
        """The guesses that were written."""
        stay = self._stays[seating]
        stay.start, stay.guessed = stay.tokens, tokens

    def forget(self, seatings: Sequence[int]) -> None:
        """These stays are over; what is known by key stays known."""
        for seating in seatings:
            self._stays.pop(seating, None)


def _common(text: Sequence[int], start: int, guessed: Sequence[int]) -> int:
    """Leading tokens of ``guessed`` that the text has from ``start`` on."""
    for i, token in enumerate(guessed):
        if start + i >= len(text) or text[start + i] != token:
            return i
    return len(guessed)


MAX_INLINE_TOKENS = 4
"""Tokens that a pass takes as rows of their own; who lacks more catches up in a chunk first."""

CATCH_UP_WORTH = 16
"""A token that may still come is worth so many of catching up: a draft computes a prompt's token in
about a hundredth of the time that its target takes for a step."""


SIZE_RATIO_TOKENS = 12
MIN_CATCH_UP, MAX_CATCH_UP = 32, 512
"""Tokens that are caught up in a step at most: so many times what the target is larger, between
these two. On a CPU they take about a step of the target alone with one sequence."""

WARM_UP_S = 0.5
"""Most that making products ready on a CPU may take; what is not ready is made when needed."""


class DraftModel:
    """Proposes chains. ``state`` is the target's, ``pages`` the size of its pool; ``positions``
    the draft's longest context, ``chunk`` the tokens it catches up in a step at most."""

    name = "draft"
    wants_hidden = False
    caught_up_s = 0.0

    def __init__(
        self,
        model: DecoderModel,
        state: RowState,
        *,
        pages: int,
        positions: int,
        most: int,
        chunk: int = MAX_CATCH_UP,
    ) -> None:
        self.most = most
        self._state = state
        self._positions, self._chunk = positions, chunk
        self._runner = DraftModelRunner(model, state, pages)
        self._known = DraftKvIndex(pages)
        self._told: tuple[list[DraftRequest], Tensor] | None = None  # the last drafts: [b, nodes]

    def passes(self, nodes: int) -> int:
        return nodes

    @torch.inference_mode()
    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        self._learn()
        began = time.perf_counter()
        ready, caught_up = self._catch_up(sequences, wanted)
        self.caught_up_s = time.perf_counter() - began if caught_up else 0.0
        if not ready:
            return Drafts([0] * len(sequences), torch.empty_like(rows[:0]))
        ready.sort(key=lambda r: -r.nodes)  # so that those that go on are the first ones
        for r in ready:
            self._known.write(r.sequence, len(r.sequence.tokens), r.nodes - 1)
        places = torch.tensor([r.place for r in ready], device=rows.device)
        drawn = self._runner.draw(ready, rows[places])
        self._told = ready, drawn
        return _packed(ready, drawn, len(sequences))

    def saw(self, advance: VerifiedStep) -> None:
        pass

    def forget(self, seatings: Sequence[int]) -> None:
        self._learn()
        self._known.forget(seatings)

    def _learn(self) -> None:
        """What the last drafts were: read when the device has long been done with them."""
        if self._told is not None:
            ready, drawn = self._told
            self._told = None
            for r, tokens in zip(ready, drawn.tolist(), strict=True):
                self._known.guess(r.sequence.row_lease, tokens[: r.nodes - 1])

    # ---- catching up ------------------------------------------------------------------------

    def _catch_up(
        self, sequences: Sequence[Running], wanted: Sequence[int]
    ) -> tuple[list[DraftRequest], bool]:
        """Those that can be proposed to in this step, after some more have come closer to it; and
        whether any had to."""
        ready: list[DraftRequest] = []
        chunks: list[tuple[Running, int, int]] = []  # tokens known, and to compute
        left = self._chunk
        for place, (sequence, nodes) in enumerate(zip(sequences, wanted, strict=True)):
            length = len(sequence.tokens)
            nodes = min(nodes, self.most, self._positions - length + 1)
            if nodes <= 0:
                continue
            if sequence.row_pages != len(sequence.pages):
                self._state.seat(sequence)
            known = min(self._known.tokens(sequence), length - 1)
            if length - known > MAX_INLINE_TOKENS:
                missing = length - 1 - known
                count = min(missing, left) if _pays(sequence, missing) else 0
                if count:
                    chunks.append((sequence, known, count))
                    left -= count
                    self._known.write(sequence, known + count)
                if count < missing:
                    continue
                known += count
            ready.append(DraftRequest(place, sequence, known, nodes))
        if chunks:
            self._runner.compute(chunks)
        return ready, bool(chunks)


def load_draft(
    folder: Path,
    target: DecoderModel,
    state: RowState,
    *,
    pages: int,
    most: int,
    target_folder: Path | None = None,
) -> DraftModel:
    """The model in ``folder`` as the draft of ``target``, in its type and on its device.

    Raises StartupError where it cannot be loaded, has another vocabulary, or is not finite: it
    would draft nonsense for its time. Sizes may differ where tokenizers are known to be the same:
    checkpoints pad their vocabularies.
    """
    config = load_config(folder)
    if target_folder is not None:
        check_vocabularies(folder, target_folder)
    elif config.vocab_size != target.config.vocab_size:
        raise StartupError(
            f"{folder}: has a vocabulary of {config.vocab_size} tokens; expected the target's,"
            f" of {target.config.vocab_size}"
        )
    weights = load_weights(
        folder, config, target.dtype, target.device, linear=make_draft_linear, finite=True
    )
    longest = state.block_table.shape[1] * BLOCK_TOKENS
    positions = min(config.max_positions, longest)
    model = DecoderModel(config, weights, positions)
    portion = SIZE_RATIO_TOKENS * target.weights.bytes // model.weights.bytes
    chunk = min(MAX_CATCH_UP, max(MIN_CATCH_UP, portion))
    if model.device.type == "cpu":
        warm_up_products(model, max(chunk, MAX_INLINE_TOKENS * len(state.length)), most_s=WARM_UP_S)
    return DraftModel(model, state, pages=pages, positions=positions, most=most, chunk=chunk)


def _pays(sequence: Running, missing: int) -> bool:
    """Whether what may still come is worth computing ``missing`` tokens."""
    return missing <= CATCH_UP_WORTH * (sequence.request.length_limit - len(sequence.tokens))


def _packed(ready: Sequence[DraftRequest], drawn: Tensor, sequences: int) -> Drafts:
    """In the order that they were asked for."""
    nodes = drawn.shape[1]
    counts = np.zeros(sequences, dtype=np.int64)
    start = np.zeros(sequences, dtype=np.int64)  # in ``drawn``, flat
    for i, r in enumerate(ready):
        counts[r.place], start[r.place] = r.nodes, i * nodes
    ends = np.cumsum(counts)
    shift = np.repeat(start - (ends - counts), counts)
    at = torch.from_numpy(shift + np.arange(int(ends[-1]))).to(drawn.device)
    return Drafts(counts.tolist(), drawn.flatten()[at])
