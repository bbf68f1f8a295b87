"""Medusa (Cai et al. 2024): heads that foretell several tokens from the target's last feature.

One pass proposes a whole tree: its tokens of depth d are the most promising ones of head d. All
that is kept of a sequence is the target's last output for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batching.row_state import RowState
from engine.model.decoder import DecoderModel
from engine.model.linear import Linear, make_linear
from engine.model.weights import CheckpointTensors
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.draft_source import read_head_config, refuse_pickles
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.draft_runner import DraftSampler
from engine.speculation.proposers.draft_tree import best_tree, pack_tree_drafts, read_tree_prior
from engine.speculation.proposers.proposer import VerifiedStep
from protocol.errors import StartupError

# MERGED engine.speculation.heads_medusa
# Medusa heads: what is in a checkpoint, and what they make of the target's features.
#
#     published   {head}.{block}.linear.weight, .bias            blocks: x + SiLU(W x + b)
#                 {head}.{blocks}.weight                         the head's own reading of the
#                 result
#     vLLM's      blocks.{head}.layers.{block}.weight, .bias     the bias is optional
#                 lm_heads.{head}.weight
#
# (Cai et al. 2024, Medusa, section 2.1.) Where no head has a reading of its own, the target's head
# reads them all, as it does in vLLM under ``original_lm_head``; where the first one alone has, that
# one reads them all.

_NAMES = (
    ("{prefix}{head}.{block}.linear", "{prefix}{head}.{blocks}.weight"),
    ("{prefix}blocks.{head}.layers.{block}", "{prefix}lm_heads.{head}.weight"),
)
_PREFIXES = ("", "medusa_heads.", "medusa_head.")


@dataclass(frozen=True)
class MedusaTensorNames:
    """Of the tensors in one checkpoint."""

    heads: int
    blocks: int
    block: str
    reading: str

    def of_block(self, head: int, block: int, part: str) -> str:
        return f"{self.block.format(head=head, block=block)}.{part}"

    def of_reading(self, head: int) -> str:
        return self.reading.format(head=head)

    def check(self, names: Collection[str], folder: Path) -> None:
        """Raises StartupError for a tensor that belongs to no head."""
        known = {self.of_reading(head) for head in range(self.heads)} | {"lm_head.weight"}
        for head in range(self.heads):
            for block in range(self.blocks):
                known |= {self.of_block(head, block, part) for part in ("weight", "bias")}
        if unknown := sorted(set(names) - known):
            raise StartupError(
                f"{folder}: tensor {unknown[0]} is of none of {self.heads} Medusa heads of"
                f" {self.blocks} blocks"
            )


def find_medusa_names(names: Collection[str], folder: Path) -> MedusaTensorNames:
    """Which layout it is, and of how many heads. Raises StartupError where it is none of them."""
    if "token_map" in names:
        raise StartupError(f"{folder}: heads of a cut vocabulary (token_map) are not supported")
    for prefix in _PREFIXES:
        for block, reading in _NAMES:
            spelled = block.format(prefix=re.escape(prefix), head=r"(\d+)", block=r"(\d+)")
            found = [re.fullmatch(spelled + r"\.weight", name) for name in names]
            at = [(int(m[1]), int(m[2])) for m in found if m]
            if at:
                heads, blocks = max(h for h, _ in at) + 1, max(b for _, b in at) + 1
                name = block.format(prefix=prefix, head="{head}", block="{block}")
                own = reading.format(prefix=prefix, head="{head}", blocks=blocks)
                return MedusaTensorNames(heads, blocks, name, own)
    shown = ", ".join(sorted(names)[:4])
    raise StartupError(
        f"{folder}: no Medusa heads; expected 0.0.linear.weight or blocks.0.layers.0.weight,"
        f" found {shown}"
    )


class MedusaHeads:
    """All heads of a checkpoint; the blocks of all heads are multiplied at once."""

    def __init__(self, model: DecoderModel, folder: Path) -> None:
        """Raises StartupError naming what is missing, or does not fit the target."""
        refuse_pickles(folder)
        tensors = CheckpointTensors(folder, model.dtype, model.device, finite=True)
        names = find_medusa_names(tensors.names, folder)
        names.check(tensors.names, folder)
        self.heads = names.heads
        self._model = model
        blocks = [_block(tensors, names, i, model.config.hidden_size) for i in range(names.blocks)]
        self._blocks = blocks  # each [heads, hidden, hidden] (in, out) and [heads, 1, hidden]
        self._readings = _readings(tensors, names, model)

    def __call__(self, features: Tensor, depths: int) -> Tensor:
        """Logits [depths * B, vocab] in fp32 of the first ``depths`` heads, head by head, from
        features [B, hidden], what the target's head sees."""
        x = features.expand(depths, *features.shape)
        for weight, bias in self._blocks:
            x = x + F.silu(torch.baddbmm(bias[:depths], x, weight[:depths]))
        if not self._readings:
            return self._model.lm_head(x.flatten(0, 1))
        read = [reading(rows) for reading, rows in zip(self._readings, x, strict=False)]
        return torch.cat(read).float()


def _block(
    tensors: CheckpointTensors, names: MedusaTensorNames, block: int, hidden: int
) -> tuple[Tensor, Tensor]:
    weights, biases = [], []
    for head in range(names.heads):
        weight = tensors(names.of_block(head, block, "weight"), (hidden, hidden))
        bias = names.of_block(head, block, "bias")
        weights.append(weight.t())
        known = bias in tensors.names
        biases.append(tensors(bias, (hidden,)) if known else weight.new_zeros(hidden))
    return torch.stack(weights), torch.stack(biases)[:, None]


def _readings(
    tensors: CheckpointTensors, names: MedusaTensorNames, model: DecoderModel
) -> list[Linear]:
    """One for each head; none: the target's head reads."""
    shape = (model.config.vocab_size, model.config.hidden_size)
    own = [names.of_reading(head) for head in range(names.heads)]
    missing = [name for name in own if name not in tensors.names]
    if len(missing) == names.heads:
        return []
    if missing == own[1:]:
        return [make_linear(tensors(own[0], shape))] * names.heads
    return [make_linear(tensors(name, shape)) for name in own]


MAX_NODES = 32
"""Nodes of a tree at most."""


class MedusaProposer:
    """Proposes what the heads in ``folder`` foretell."""

    name = "medusa"
    wants_hidden = True
    caught_up_s = 0.0

    def __init__(
        self, model: DecoderModel, state: RowState, folder: Path, most: int = MAX_NODES
    ) -> None:
        """Raises StartupError for heads that cannot be loaded or do not fit ``model``."""
        self._model = model
        self._state = state
        self._heads = MedusaHeads(model, folder)
        prior = read_tree_prior(read_head_config(folder), self._heads.heads, str(folder))
        self._tree = best_tree(prior, min(most, MAX_NODES))
        self._place = self._tree.place(model.device)
        self.most = len(self._tree.ranks)
        rows, hidden = len(state.length), model.config.hidden_size
        # What the model made of the token before the last one: [rows, hidden].
        self._hidden = torch.zeros(rows, hidden, dtype=model.dtype, device=model.device)
        self._seen = [-1] * rows  # whose it is, by seating

    def passes(self, nodes: int) -> int:
        return 1 if nodes else 0

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        counts = [
            min(nodes, self.most) if self._seen[s.row] == s.row_lease else 0
            for s, nodes in zip(sequences, wanted, strict=True)
        ]
        asked = [i for i, count in enumerate(counts) if count]
        if not asked:
            return Drafts(counts, rows[:0])
        if len(asked) < len(counts):
            rows = rows[torch.tensor(asked, device=rows.device)]
        most = max(counts)
        tokens = self._tokens([sequences[i] for i in asked], rows, most)
        drafts = pack_tree_drafts(tokens, [counts[i] for i in asked], self._tree)
        return Drafts(counts, drafts.tokens, drafts.parents)

    def _tokens(self, sequences: Sequence[Running], rows: Tensor, nodes: int) -> Tensor:
        """Of the first ``nodes`` nodes of the tree: [B, nodes]."""
        depths, width = self._tree.deepest[nodes - 1], self._tree.widest[nodes - 1]
        features = self._model.weights.final_norm(self._hidden[rows])
        logits = self._heads(features, depths)  # [depths * B, vocab]
        ahead = torch.arange(depths, device=rows.device)[:, None]
        positions = (self._state.length[rows] + ahead).flatten()
        draws = DraftSampler(sequences, rows.repeat(depths), self._state.sampling)
        best = draws.ranked(logits, positions, width).view(depths, len(rows), width)
        depth, rank = self._place
        at = torch.arange(len(rows), device=rows.device)
        return best[depth[:nodes], at, rank[:nodes]].t()  # [B, nodes]

    def saw(self, advance: VerifiedStep) -> None:
        self._hidden.index_copy_(0, advance.rows, advance.hidden[advance.at[:, -1]])
        for sequence in advance.sequences:
            self._seen[sequence.row] = sequence.row_lease

    def forget(self, seatings: Sequence[int]) -> None:
        """Whoever comes next to a row has another seating: there is nothing to do."""
