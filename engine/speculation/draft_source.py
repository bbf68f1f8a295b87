"""What an engine drafts with: the draft folder's kind, its memory, and its vocabulary. Torch-free.

A draft folder contains Medusa heads, an EAGLE head, or a draft model. The engine's loading code,
the doctor and the planner call this module.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from engine.ipc.settings import SpeculationSettings
from engine.model_config.checkpoint import load_config, read_shards, resident_elements
from engine.model_config.config import ModelConfig
from protocol.errors import StartupError
from protocol.json_file import MAX_TOKENIZER_BYTES, read_json_file

DraftKind: TypeAlias = Literal["medusa", "eagle", "draft"]
DraftMethod: TypeAlias = Literal["ngram"] | DraftKind

DRAFT_KIND_TEXT = {"draft": "a draft model", "medusa": "Medusa heads", "eagle": "an EAGLE head"}

SIZE_RATIO_TOKENS = 12
MIN_CATCH_UP, MAX_CATCH_UP = 32, 512
"""Bounds of ``catch_up_chunk``, in tokens."""

_MEDUSA = re.compile(r"^(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight$")
_PICKLES = ("*.bin", "*.pt", "*.pth")


def catch_up_chunk(target_bytes: float, draft_bytes: float) -> int:
    """Return how many tokens of texts a draft model computes at most in a step, from the bytes of
    both models' weights. On a CPU they take about one step of the target with a single
    sequence."""
    by_size = int(SIZE_RATIO_TOKENS * target_bytes // draft_bytes)
    return min(MAX_CATCH_UP, max(MIN_CATCH_UP, by_size))


class DraftSource(msgspec.Struct, frozen=True):
    """The resolved speculation method; ``folder`` is None for n-grams."""

    method: DraftMethod
    folder: Path | None = None


class DraftSize(msgspec.Struct, frozen=True):
    """The memory that drafting needs; all zero without speculation."""

    most: int = 0  # maximum nodes of a sequence in a step
    elements: int = 0  # of the weights
    kv_bytes_per_token: int = 0  # for each token of the target's pool
    row_bytes: int = 0  # results of a row of a draft model's attention in fp32, with their lse


def resolve_draft_source(spec: SpeculationSettings) -> DraftSource | None:
    """Return the source for the settings; None if speculation is off. Raises StartupError if the
    folder does not contain what the settings name."""
    if spec.method == "off":
        return None
    if spec.method == "ngram" or (spec.method == "auto" and spec.model_path is None):
        return DraftSource("ngram")
    if spec.model_path is None:
        raise StartupError(f"speculation with {spec.method} takes a model; none is given")
    folder = Path(spec.model_path)
    if not folder.is_dir():
        raise StartupError(f"{folder}: no such folder; expected a draft model or heads")
    found = detect_draft_kind(folder)
    if spec.method not in ("auto", found):
        raise StartupError(
            f"{folder}: holds {DRAFT_KIND_TEXT[found]}; expected {DRAFT_KIND_TEXT[spec.method]}"
        )
    return DraftSource(found, folder)


def draft_size(
    spec: SpeculationSettings, target: ModelConfig, element: int, *, on_cpu: bool
) -> DraftSize:
    """Return the memory for drafting; ``element`` is the bytes of one weight. It is zero if the
    draft cannot be loaded, because the engine then runs without it."""
    try:
        of, most = resolve_draft_source(spec), spec.max_tokens
        if of is None:
            return DraftSize()
        if of.folder is None:
            return DraftSize(most)
        shards = read_shards(of.folder)
        elements = sum(shards.elements.values())
        if of.method == "medusa":
            return DraftSize(most, elements)
        if of.method == "eagle":  # it has one layer, like the target's
            kv = target.kv_format("exact", "wide", element).bytes_per_token
            return DraftSize(most, elements, kv // target.layers)
        own = load_config(of.folder)
        kv = own.kv_format("exact", "wide", element).bytes_per_token
        row = own.heads * (own.head_dim + 1) * 4
        return DraftSize(most, resident_elements(shards, own, on_cpu=on_cpu), kv, row)
    except StartupError:
        return DraftSize()


def detect_draft_kind(folder: Path) -> DraftKind:
    """Return what ``folder`` contains, by tensor names: EAGLE heads have the config of a Llama.
    Raises StartupError if there are no safetensors or their content is not supported."""
    refuse_pickles(folder)
    names = read_shards(folder).elements
    if any(_MEDUSA.match(name) for name in names):
        return "medusa"
    return "eagle" if {"fc.weight", "model.fc.weight"} & set(names) else "draft"


def refuse_pickles(folder: Path) -> None:
    """Raise StartupError if all weights are pickles, because loading a pickle executes code."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        name = pickles[0].name
        raise StartupError(
            f"{folder}: {name} is a pickle, which is never loaded; expected *.safetensors. Where"
            " its source is trusted, convert it there: python -c 'import torch, safetensors.torch;"
            f' safetensors.torch.save_file(torch.load("{name}", weights_only=True),'
            ' "model.safetensors")\''
        )


def read_head_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a folder of heads; empty if it is missing. Raises StartupError."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    settings = read_json_file(path, what="config of heads")
    if not isinstance(settings, dict):
        raise StartupError(f"{path}: expected an object, found {type(settings).__name__}")
    return settings


def check_vocabularies(draft: Path, target: Path) -> None:
    """Raise StartupError if the tokenizers of two model folders assign different token ids. A
    folder without a ``tokenizer.json`` passes."""
    ours, theirs = (_tokens(folder / "tokenizer.json") for folder in (draft, target))
    if ours is None or theirs is None or ours == theirs:
        return
    different = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
    raise StartupError(
        f"{draft}: its tokenizer is not that of {target}: token {different[0][1]} is not the same"
        f" in both, nor are {len(different) - 1} other entries; expected a draft model of the same"
        " family"
    )


def _tokens(path: Path) -> dict[str, int] | None:
    """Return token -> id; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        raw: dict[str, Any] = read_json_file(path, MAX_TOKENIZER_BYTES, "tokenizer")
        vocab = raw["model"]["vocab"]
        # BPE and WordPiece list ids by token, Unigram (token, score) by id.
        known = vocab if isinstance(vocab, dict) else {t: i for i, (t, _) in enumerate(vocab)}
        tokens = {**known, **{t["content"]: t["id"] for t in raw.get("added_tokens", ())}}
        return {str(token): int(number) for token, number in tokens.items()}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        text = f"{path}: not a usable tokenizer: {repr(error)[:300]}"
        raise StartupError(text) from error
