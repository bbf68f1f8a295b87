"""What an engine is to draft with, and the memory that takes. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from engine.checkpoint import load_config
from engine.config import ModelConfig
from engine.shards import kept_elements, read_shards
from engine.spec import SpeculationSpec
from engine.speculation.heads_layout import Kind, kind_of
from protocol.errors import StartupError

Method: TypeAlias = Literal["ngram"] | Kind


class Source(msgspec.Struct, frozen=True):
    """``folder`` is None for n-grams."""

    method: Method
    folder: Path | None = None


class DraftSize(msgspec.Struct, frozen=True):
    """Weights, and bytes of KV for each token of the target's pool. ``most``: nodes of a sequence
    in a step; 0: there is nothing to draft with."""

    most: int = 0
    elements: int = 0
    kv_bytes_per_token: int = 0


def source(spec: SpeculationSpec) -> Source | None:
    """None where speculation is off. Raises StartupError for a folder that does not hold what it
    is asked for."""
    if spec.method == "off":
        return None
    if spec.method == "ngram" or (spec.method == "auto" and spec.model_path is None):
        return Source("ngram")
    if spec.model_path is None:
        raise StartupError(f"speculation with {spec.method} takes a model; none is given")
    folder = Path(spec.model_path)
    if not folder.is_dir():
        raise StartupError(f"{folder}: no such folder; expected a draft model or heads")
    found = kind_of(folder)
    if spec.method not in ("auto", found):
        raise StartupError(f"{folder}: holds {NAMES[found]}; expected {NAMES[spec.method]}")
    return Source(found, folder)


NAMES = {"draft": "a draft model", "medusa": "Medusa heads", "eagle": "an EAGLE head"}


def draft_size(
    spec: SpeculationSpec, target: ModelConfig, element: int, *, on_cpu: bool
) -> DraftSize:
    """``element``: bytes of one. Nothing where there is nothing to be had: the engine goes on
    without, then."""
    try:
        of, most = source(spec), spec.max_tokens
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
        return DraftSize(most, kept_elements(shards, own, on_cpu=on_cpu), kv)
    except StartupError:
        return DraftSize()
