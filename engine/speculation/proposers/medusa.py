"""The Medusa proposer (Cai et al. 2024): heads that predict several tokens from one hidden state.

One pass proposes a whole tree, whose tokens of depth d are the most likely ones of head d. The only
state of a sequence is the target's last hidden state. Checkpoint formats (section 2.1):

    published   {head}.{block}.linear.weight, .bias            blocks: x + SiLU(W x + b)
                {head}.{blocks}.weight                         the head's own LM head
    vLLM's      blocks.{head}.layers.{block}.weight, .bias     the bias is optional
                lm_heads.{head}.weight

If no head has an LM head of its own, the target's is used for all, as in vLLM under
``original_lm_head``; if only the first one has, it is used for all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batching.batcher import RowState
from engine.model.decoder import DecoderModel
from engine.model.linear import Linear, make_linear
from engine.model.weights import CheckpointTensors
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.draft_source import read_head_config
from engine.speculation.drafts import Drafts
from engine.speculation.proposers.draft_sampler import DraftSampler
from engine.speculation.proposers.draft_tree import best_tree, pack_tree_drafts, read_tree_prior
from engine.speculation.proposers.proposer import Proposer, VerifiedStep
from engine.uploads import upload
from protocol.errors import StartupError

_NAMES = (
    ("{prefix}{head}.{block}.linear", "{prefix}{head}.{blocks}.weight"),
    ("{prefix}blocks.{head}.layers.{block}", "{prefix}lm_heads.{head}.weight"),
)
_PREFIXES = ("", "medusa_heads.", "medusa_head.")

MAX_NODES = 32  # maximum number of nodes of a tree


class MedusaProposer(Proposer):
    """Proposes trees with the Medusa heads in ``folder``."""

    name = "medusa"
    wants_hidden = True

    def __init__(
        self, model: DecoderModel, state: RowState, folder: Path, most: int = MAX_NODES
    ) -> None:
        """Load the heads. Raises StartupError if they cannot be loaded or do not fit ``model``."""
        self._model = model
        self._state = state
        self._heads = MedusaHeads(model, folder)
        prior = read_tree_prior(read_head_config(folder), self._heads.heads, str(folder))
        self._tree = best_tree(prior, min(most, MAX_NODES))
        self._node_places = self._tree.node_places(model.device)
        self.most = len(self._tree.ranks)
        rows, hidden = len(state.length), model.config.hidden_size
        # The target's output for the token before the last one: [rows, hidden].
        self._hidden = torch.zeros(rows, hidden, dtype=model.dtype, device=model.device)
        # Row lease of the hidden state. Nothing is to be forgotten: the next sequence has another.
        self._leases = [-1] * rows

    def passes(self, nodes: int) -> int:
        return 1 if nodes else 0

    def propose(self, sequences: Sequence[Running], rows: Tensor, wanted: Sequence[int]) -> Drafts:
        """Return trees for ``sequences`` [B]; see Proposer. rows: [B] int64."""
        counts = [
            min(nodes, self.most) if self._leases[s.row] == s.row_lease else 0
            for s, nodes in zip(sequences, wanted, strict=True)
        ]
        asked = [i for i, count in enumerate(counts) if count]
        if not asked:
            return Drafts(counts, rows[:0])
        if len(asked) < len(counts):
            rows = rows[upload(asked, rows.device)]
        most = max(counts)
        tokens = self._tokens([sequences[i] for i in asked], rows, most)
        drafts = pack_tree_drafts(tokens, [counts[i] for i in asked], self._tree)
        return Drafts(counts, drafts.tokens, drafts.parents)

    def _tokens(self, sequences: Sequence[Running], rows: Tensor, nodes: int) -> Tensor:
        """Return the tokens [B, nodes] of the first ``nodes`` nodes of the tree."""
        depths, width = self._tree.deepest[nodes - 1], self._tree.widest[nodes - 1]
        features = self._model.weights.final_norm(self._hidden[rows])
        logits = self._heads(features, depths)  # [depths * B, vocab]
        ahead = torch.arange(depths, device=rows.device)[:, None]
        positions = (self._state.length[rows] + ahead).flatten()
        sampler = DraftSampler(sequences, rows.repeat(depths), self._state.sampling)
        best = sampler.ranked(logits, positions, width).view(depths, len(rows), width)
        depth, rank = self._node_places
        at = torch.arange(len(rows), device=rows.device)
        return best[depth[:nodes], at, rank[:nodes]].t()  # [B, nodes]

    def observe(self, step: VerifiedStep) -> None:
        self._hidden.index_copy_(0, step.rows, step.hidden[step.at[:, -1]])
        for sequence in step.sequences:
            self._leases[sequence.row] = sequence.row_lease


@dataclass(frozen=True)
class MedusaLayout:
    """The names of the tensors of one checkpoint."""

    heads: int
    blocks: int
    block: str
    lm_head: str

    def of_block(self, head: int, block: int, part: str) -> str:
        return f"{self.block.format(head=head, block=block)}.{part}"

    def of_lm_head(self, head: int) -> str:
        return self.lm_head.format(head=head)

    def check(self, names: Collection[str], folder: Path) -> None:
        """Raise StartupError if a tensor belongs to no head."""
        known = {self.of_lm_head(head) for head in range(self.heads)} | {"lm_head.weight"}
        for head in range(self.heads):
            for block in range(self.blocks):
                known |= {self.of_block(head, block, part) for part in ("weight", "bias")}
        if unknown := sorted(set(names) - known):
            raise StartupError(
                f"{folder}: tensor {unknown[0]} is of none of {self.heads} Medusa heads of"
                f" {self.blocks} blocks"
            )


def detect_medusa_layout(names: Collection[str], folder: Path) -> MedusaLayout:
    """Detect the checkpoint format and the number of heads. Raises StartupError if unknown."""
    if "token_map" in names:
        raise StartupError(f"{folder}: heads of a cut vocabulary (token_map) are not supported")
    for prefix in _PREFIXES:
        for block, lm_head in _NAMES:
            spelled = block.format(prefix=re.escape(prefix), head=r"(\d+)", block=r"(\d+)")
            found = [re.fullmatch(spelled + r"\.weight", name) for name in names]
            at = [(int(m[1]), int(m[2])) for m in found if m]
            if at:
                heads, blocks = max(h for h, _ in at) + 1, max(b for _, b in at) + 1
                name = block.format(prefix=prefix, head="{head}", block="{block}")
                own = lm_head.format(prefix=prefix, head="{head}", blocks=blocks)
                return MedusaLayout(heads, blocks, name, own)
    shown = ", ".join(sorted(names)[:4])
    raise StartupError(
        f"{folder}: no Medusa heads; expected 0.0.linear.weight or blocks.0.layers.0.weight,"
        f" found {shown}"
    )


class MedusaHeads:
    """All heads of a checkpoint; blocks of equal index are computed in one batched product."""

    def __init__(self, model: DecoderModel, folder: Path) -> None:
        """Raises StartupError naming what is missing, or does not fit the target."""
        tensors = CheckpointTensors(folder, model.dtype, model.device, finite=True)
        names = detect_medusa_layout(tensors.names, folder)
        names.check(tensors.names, folder)
        self.heads = names.heads
        self._model = model
        blocks = [
            _load_block(tensors, names, i, model.config.hidden_size) for i in range(names.blocks)
        ]
        self._blocks = blocks  # each [heads, hidden, hidden] (in, out) and [heads, 1, hidden]
        self._lm_heads = _load_lm_heads(tensors, names, model)

    def __call__(self, features: Tensor, depths: int) -> Tensor:
        """Return logits [depths * B, vocab] in fp32 of the first ``depths`` heads, head by head.
        features: [B, hidden], the input of the target's LM head."""
        x = features.expand(depths, *features.shape)
        for weight, bias in self._blocks:
            x = x + F.silu(torch.baddbmm(bias[:depths], x, weight[:depths]))
        if not self._lm_heads:
            return self._model.lm_head(x.flatten(0, 1))
        logits = [lm_head(rows) for lm_head, rows in zip(self._lm_heads, x, strict=False)]
        return torch.cat(logits).float()


def _load_block(
    tensors: CheckpointTensors, names: MedusaLayout, block: int, hidden: int
) -> tuple[Tensor, Tensor]:
    weights, biases = [], []
    for head in range(names.heads):
        weight = tensors(names.of_block(head, block, "weight"), (hidden, hidden))
        bias = names.of_block(head, block, "bias")
        weights.append(weight.t())
        known = bias in tensors.names
        biases.append(tensors(bias, (hidden,)) if known else weight.new_zeros(hidden))
    return torch.stack(weights), torch.stack(biases)[:, None]


def _load_lm_heads(
    tensors: CheckpointTensors, names: MedusaLayout, model: DecoderModel
) -> list[Linear]:
    """Return one LM head for each Medusa head; empty: the target's is used."""
    shape = (model.config.vocab_size, model.config.hidden_size)
    own = [names.of_lm_head(head) for head in range(names.heads)]
    missing = [name for name in own if name not in tensors.names]
    if len(missing) == names.heads:
        return []
    if missing == own[1:]:
        return [make_linear(tensors(own[0], shape))] * names.heads
    return [make_linear(tensors(name, shape)) for name in own]
