"""Whether two models mean the same by a token. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocol.errors import StartupError


def check_vocabularies(draft: Path, target: Path) -> None:
    """Raises StartupError where the tokenizers of two model folders name their tokens differently.
    A folder without a ``tokenizer.json`` says nothing of it, and passes."""
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
    """Token -> id; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        vocab = raw["model"]["vocab"]
        # BPE and WordPiece list ids by token, Unigram (token, score) by id.
        known = vocab if isinstance(vocab, dict) else {t: i for i, (t, _) in enumerate(vocab)}
        return {**known, **{t["content"]: t["id"] for t in raw.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{path}: not a usable tokenizer: {error!r}") from error
