"""What a draft's folder holds: Medusa heads, an EAGLE head, or a model of its own. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, TypeAlias

from engine.shards import read_shards
from protocol.errors import StartupError

Kind: TypeAlias = Literal["medusa", "eagle", "draft"]

_MEDUSA = re.compile(r"^(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight$")
_PICKLES = ("*.bin", "*.pt", "*.pth")


def kind_of(folder: Path) -> Kind:
    """Told from the names of the tensors, because published EAGLE heads have the config of a Llama.

    Raises StartupError where there are no safetensors, or what they hold is not supported.
    """
    refuse_pickles(folder)
    return kind_of_names(read_shards(folder).elements)


def kind_of_names(names: Collection[str]) -> Kind:
    """The same, of tensors with these names."""
    if any(_MEDUSA.match(name) for name in names):
        return "medusa"
    return "eagle" if {"fc.weight", "model.fc.weight"} & set(names) else "draft"


def is_eagle3(names: Collection[str]) -> bool:
    """Whether an EAGLE head is one of EAGLE-3: it norms the features that its layer takes."""
    return any(name.endswith(".hidden_norm.weight") for name in names)


def refuse_pickles(folder: Path) -> None:
    """Raises StartupError where the weights are in pickles alone: to read one is to run it."""
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


def read_settings(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder of heads; empty where there is none. Raises StartupError."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: cannot read the heads' config: {error}") from error
    if not isinstance(settings, dict):
        raise StartupError(f"{path}: expected an object, found {type(settings).__name__}")
    return settings
