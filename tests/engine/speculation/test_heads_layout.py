"""Published layouts of heads: told apart, loaded alike, refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batching.attention_metadata import AttentionMetadata
from engine.model.decoder import DecoderModel
from engine.speculation.draft_source import detect_draft_kind
from engine.speculation.drafts import ROOT
from engine.speculation.proposers.draft_tree import best_tree, pack_tree_drafts, read_tree_prior
from engine.speculation.proposers.eagle_heads import Eagle3Head, EagleHead
from engine.speculation.proposers.eagle_layer import EagleAttention, EagleSpans
from engine.speculation.proposers.medusa import MedusaHeads
from protocol.errors import StartupError
from tests.engine.heads import (
    EAGLE3_CONFIG,
    EAGLE_CONFIG,
    State,
    eagle3_state,
    eagle_features,
    eagle_state,
    medusa_logits,
    medusa_state,
    write,
)

Change = Callable[[State], State]


def renamed(state: State, heads: int = 3, blocks: int = 1) -> State:
    """From the published layout to vLLM's."""
    names = {f"{h}.{blocks}.weight": f"lm_heads.{h}.weight" for h in range(heads)}
    for h in range(heads):
        for b in range(blocks):
            for part in ("weight", "bias"):
                names[f"{h}.{b}.linear.{part}"] = f"blocks.{h}.layers.{b}.{part}"
    return {names[name]: tensor for name, tensor in state.items()}


def without(state: State, ending: str) -> State:
    return {name: tensor for name, tensor in state.items() if not name.endswith(ending)}


# ---- Medusa ----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("layout", ["published", "prefixed", "vllm"])
def test_medusa_heads_of_every_layout_give_equal_logits(
    tiny: DecoderModel, tmp_path: Path, layout: str, blocks: int
) -> None:
    state = medusa_state(tiny, blocks=blocks)
    spelled = {
        "published": state,
        "prefixed": {f"medusa_heads.{name}": t for name, t in state.items()},
        "vllm": renamed(state, blocks=blocks),
    }[layout]
    heads = MedusaHeads(tiny, write(tmp_path, spelled, {}))
    assert heads.heads == 3
    features = torch.randn(5, tiny.config.hidden_size)
    for count in (1, 3):
        logits = heads(features, count).view(count, 5, -1)
        for row in range(5):
            expected = medusa_logits(state, features[row], blocks=blocks)[:count]
            torch.testing.assert_close(logits[:, row], expected, rtol=1e-4, atol=1e-4)


def test_medusa_heads_without_lm_head_use_the_targets(tiny: DecoderModel, tmp_path: Path) -> None:
    state = medusa_state(tiny)
    blocks = {name: t for name, t in state.items() if "linear" in name}
    features = torch.randn(2, tiny.config.hidden_size)
    logits = MedusaHeads(tiny, write(tmp_path / "a", blocks, {}))(features, 2).view(2, 2, -1)
    weight, bias = state["1.0.linear.weight"], state["1.0.linear.bias"]
    expected = tiny.lm_head(features + torch.nn.functional.silu(features @ weight.t() + bias))
    torch.testing.assert_close(logits[1], expected, rtol=1e-4, atol=1e-4)
    # And where the first has one alone, it reads them all.
    first = renamed(without(without(state, "1.1.weight"), "2.1.weight"))
    shared = MedusaHeads(tiny, write(tmp_path / "b", first, {}))(features, 3).view(3, 2, -1)
    same = {**state, "1.1.weight": state["0.1.weight"], "2.1.weight": state["0.1.weight"]}
    expected = medusa_logits(same, features[0])
    torch.testing.assert_close(shared[:, 0], expected, rtol=1e-4, atol=1e-4)


# ---- EAGLE -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle_head_matches_plain_torch(
    tiny: DecoderModel, tmp_path: Path, bias: bool, prefix: str
) -> None:
    state = eagle_state(tiny, bias=bias)
    embedding = torch.randn(tiny.config.vocab_size, tiny.config.hidden_size)
    spelled = {prefix + name: t for name, t in state.items()}
    spelled[prefix + "embed_tokens.weight"] = embedding
    spelled["lm_head.weight"] = torch.randn_like(embedding)  # the target's is the one that counts
    head = EagleHead(tiny, write(tmp_path, spelled, EAGLE_CONFIG), pages=4, positions=128)
    tokens, before = torch.arange(40) * 7, torch.randn(40, tiny.config.hidden_size)
    length = torch.tensor([40])
    spans = EagleSpans(*(t.numpy() for t in (length * 0, length * 0, length)))
    table = torch.tensor([[2, 1, 3]])
    positions = torch.arange(40)
    slots = table[0, positions // 32] * 32 + positions % 32
    view: AttentionMetadata = EagleAttention(spans, table, 1, 2, torch.float32).first_pass()
    out = head(tokens, before, positions, slots, view)
    expected = eagle_features(state, embedding[tokens], before, 0)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_draft_kind_is_detected_from_tensor_names(tiny: DecoderModel, tmp_path: Path) -> None:
    llama = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}
    kinds: dict[str, State] = {"medusa": medusa_state(tiny), "eagle": eagle_state(tiny)}
    for kind, state in (kinds | {"draft": llama}).items():
        assert detect_draft_kind(write(tmp_path / kind, state, EAGLE_CONFIG)) == kind
    assert (
        detect_draft_kind(write(tmp_path / "three", eagle3_state(tiny), EAGLE3_CONFIG)) == "eagle"
    )
    assert detect_draft_kind(write(tmp_path / "v", renamed(kinds["medusa"]), {})) == "medusa"
    check = "import sys, engine.speculation.draft_source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


# ---- refusals --------------------------------------------------------------------------------


def cut(name: str) -> Change:
    return lambda state: {n: t[:, :-1].contiguous() if n == name else t for n, t in state.items()}


def add(name: str) -> Change:
    return lambda state: {**state, name: torch.zeros(3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, "2.0.linear.weight"), r"2\.0\.linear\.bias is of none of 2"),
        (lambda s: without(s, "1.0.linear.weight"), r"1\.0\.linear\.weight is missing"),
        (lambda s: without(s, "1.1.weight"), r"1\.1\.weight is missing"),
        (cut("1.1.weight"), r"1\.1\.weight has shape \(320, 63\), expected \(320, 64\)"),
        (cut("0.0.linear.weight"), r"0\.0\.linear\.weight has shape \(64, 63\)"),
        (add("token_map"), "cut vocabulary"),
        (lambda s: {"what": torch.zeros(2)}, r"no Medusa heads; expected .* found what"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused_by_name(
    tiny: DecoderModel, tmp_path: Path, change: Change, message: str
) -> None:
    folder = write(tmp_path, change(medusa_state(tiny)), {})
    with pytest.raises(StartupError, match=message):
        MedusaHeads(tiny, folder)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda s: without(s, "fc.weight"), {}, r"fc\.weight is missing"),
        (lambda s: without(s, "down_proj.weight"), {}, r"down_proj\.weight is missing"),
        (cut("fc.weight"), {}, r"fc\.weight has shape \(64, 127\), expected \(64, 128\)"),
        (add("layers.0.input_layernorm.weight"), {}, r"input_layernorm\.weight is none of"),
        (add("layers.1.mlp.up_proj.weight"), {}, r"layers\.1\.mlp\.up_proj\.weight is none of"),
        (dict, {"hidden_size": 32}, "hidden_size 32, but that of the target is 64"),
        (dict, {"vocab_size": 999}, "vocab_size 999, but that of the target is 320"),
        (dict, {"num_hidden_layers": 2}, "2 layers"),
    ],
)
def test_an_eagle_head_that_does_not_fit_is_refused_by_name(
    tiny: DecoderModel, tmp_path: Path, change: Change, config: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path, change(eagle_state(tiny)), {**EAGLE_CONFIG, **config})
    with pytest.raises(StartupError, match=message):
        EagleHead(tiny, folder, pages=2, positions=64)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (
            lambda s: without(s, "midlayer.hidden_norm.weight"),
            {},
            r"hidden_norm\.weight is missing",
        ),
        (lambda s: without(s, "d2t"), {}, "d2t is missing; lm_head reads 200 tokens"),
        (lambda s: {**s, "d2t": s["d2t"] + 300}, {}, "d2t leads beyond the vocabulary of 320"),
        (cut("midlayer.self_attn.q_proj.weight"), {}, r"q_proj\.weight has shape \(64, 127\)"),
        (add("midlayer.extra"), {}, r"midlayer\.extra is none of an EAGLE-3"),
        (dict, {"draft_vocab_size": 99}, r"lm_head\.weight has shape \(200, 64\), expected \(99"),
        (dict, {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"of 3 layers it cannot see"),
        (dict, {"eagle_aux_hidden_state_layer_ids": None}, r"cannot see \[2, 1, 0\]"),
    ],
)
def test_an_eagle_3_head_that_does_not_fit_is_refused_by_name(
    tiny: DecoderModel, tmp_path: Path, change: Change, config: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path, change(eagle3_state(tiny)), {**EAGLE3_CONFIG, **config})
    with pytest.raises(StartupError, match=message):
        Eagle3Head(tiny, folder, pages=2, positions=64)


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "medusa_lm_head.pt").write_bytes(b"cos\nsystem\n")
    with pytest.raises(StartupError, match=r"medusa_lm_head\.pt is a pickle.*convert"):
        detect_draft_kind(folder)


@pytest.mark.parametrize("prior", [3, [["a"]], [[]], []])
def test_invalid_tree_prior_is_refused(prior: Any) -> None:
    with pytest.raises(StartupError, match=r"x: tree_prior"):
        read_tree_prior({"tree_prior": prior}, 2, "x")


def test_depths_beyond_the_given_ones_are_like_the_last() -> None:
    assert (
        read_tree_prior({"tree_prior": [[0.5], [0.25, 0.125]]}, 3, "x")[1:] == [[0.25, 0.125]] * 2
    )
    assert (
        len(read_tree_prior({"tree_prior": [[0.5]] * 9}, 3, "x"))
        == len(read_tree_prior({}, 3, "x"))
        == 3
    )


# ---- trees -----------------------------------------------------------------------------------

chances = st.floats(0.01, 0.99)
priors = st.lists(
    st.lists(chances, min_size=1, max_size=5).map(lambda r: sorted(r, reverse=True)),
    min_size=1,
    max_size=5,
)


@given(priors, st.integers(1, 30), st.booleans())
def test_best_tree_has_the_most_probable_nodes(
    prior: list[list[float]], nodes: int, spine_only: bool
) -> None:
    tree = best_tree(prior, nodes, spine_only=spine_only)
    chance: list[float] = []
    for d, r, parent in zip(tree.depths, tree.ranks, tree.parents, strict=True):
        assert d == (0 if parent == ROOT else tree.depths[parent] + 1)
        chance.append(prior[d][r] * (1.0 if parent == ROOT else chance[parent]))
    assert chance == sorted(chance, reverse=True)
    assert len(set(zip(tree.parents, tree.ranks, strict=True))) == len(tree.ranks)
    if spine_only:
        assert all(parent == ROOT or tree.ranks[parent] == 0 for parent in tree.parents)
    bigger = best_tree(prior, nodes + 1, spine_only=spine_only)
    assert bigger.ranks[: len(tree.ranks)] == tree.ranks
    if len(bigger.ranks) == len(tree.ranks) and not spine_only:  # there are no more
        assert len(tree.ranks) == sum(
            torch.tensor([len(ranks) for ranks in prior[:d]]).prod()
            for d in range(1, len(prior) + 1)
        )


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_packed_are_the_first_nodes_of_each(counts: list[int]) -> None:
    tree = best_tree([[0.5, 0.4], [0.4, 0.3]], 6)
    tokens = torch.arange(len(counts) * 6).view(-1, 6)
    drafts = pack_tree_drafts(tokens, counts, tree)
    expected = [6 * i + node for i, count in enumerate(counts) for node in range(count)]
    assert drafts.tokens.tolist() == expected
    for i, count in enumerate(counts):
        assert drafts.parents_of(i) == list(tree.parents[:count])
