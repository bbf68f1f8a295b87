"""Finds and reads the chat template of a model's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from protocol.errors import StartupError
from router.openai.chat.template import ChatTemplate


def load_template(model_path: str, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the chat template of a model's folder; None where it has none.

    The places are those of Hugging Face: ``chat_template.jinja`` with
    ``additional_chat_templates/``, or ``chat_template.json``, or ``chat_template`` in
    ``tokenizer_config.json`` (one text, or a list of names and texts). Raises StartupError for one
    that cannot be read.
    """
    folder = Path(model_path)
    config = _read_json(folder / "tokenizer_config.json")
    sources = _template_texts(folder, config)
    if not sources:
        return None
    special = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(
        config
    )
    try:
        return ChatTemplate(sources, special, tokenizer)
    except TemplateError as error:
        raise StartupError(f"the chat template in {folder} is not a template: {error}") from error


def _template_texts(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        more = (folder / "additional_chat_templates").glob("*.jinja")
        return {"default": _read(path), **{extra.stem: _read(extra) for extra in more}}
    of_config = config.get("chat_template")
    given = _read_json(folder / "chat_template.json").get("chat_template", of_config)
    if isinstance(given, list):
        entries = [entry for entry in given if isinstance(entry, dict)]
        given = {entry.get("name"): entry.get("template") for entry in entries} or given
    if isinstance(given, str):
        given = {"default": given}
    if not given:
        return {}
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise StartupError(f"the chat template in {folder} is neither text nor a list of texts")
    # Without a default, the first is the default.
    return {"default": next(iter(given.values())), **given}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token`` and the like, each given as text or as an object with its
    ``content``."""
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if re.fullmatch("[a-z_]+_token", name) and isinstance(text, str):
            found[name] = text
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the chat template at {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}
