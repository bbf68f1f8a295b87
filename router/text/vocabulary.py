"""The served model's tokenizer, with the tables that its tokens are looked up in.

``load_tokenizer`` and ``load_vocabulary`` run at the router's start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from protocol.errors import StartupError
from router.text.detokenizer import Detokenizer, detokenizer_factory

_CACHED_TOKENS = 1 << 15
"""Tokens whose names are kept."""


class Vocabulary:
    """Tokenizer and detokenizers of the served model. One per router.

    Its tables are built at the start: large vocabularies take some 100 ms.
    """

    def __init__(self, tokenizer: Tokenizer, eos: frozenset[int] = frozenset()) -> None:
        """Raises StartupError for a tokenizer whose decoder is not supported."""
        self.tokenizer = tokenizer
        self.eos = eos  # tokens that end a text, special or not
        self._without_special = detokenizer_factory(tokenizer)
        self._with_special = detokenizer_factory(tokenizer, skip_special=False)
        self.name_of: Callable[[int], str] = lru_cache(_CACHED_TOKENS)(self._name)
        """A token as text, part of a character as ``bytes:\\xf0``: as OpenAI names it."""
        self.octets_of: Callable[[int], list[int]] = lru_cache(_CACHED_TOKENS)(self._octets)
        """The values of the token's bytes; the list must not be changed."""

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """Return a new detokenizer for one text."""
        return self._without_special() if skip_special else self._with_special()

    def is_textless(self, token: int, *, skip_special: bool = True) -> bool:
        """Whether the token is no part of any text."""
        factory = self._without_special if skip_special else self._with_special
        return not factory.bytes_of(token)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token by itself; those of its name for a special token."""
        return self._with_special.bytes_of(token)

    def _name(self, token: int) -> str:
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _octets(self, token: int) -> list[int]:
        return list(self.bytes_of(token))


def load_vocabulary(tokenizer: Tokenizer, model_path: str) -> Vocabulary:
    """Raises StartupError for a model folder whose files cannot be used."""
    return Vocabulary(tokenizer, _eos_tokens(Path(model_path)))


def _eos_tokens(folder: Path) -> frozenset[int]:
    """The engine reads the same files: ``generation_config.json``, else ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            return frozenset(i for i in listed if type(i) is int)
    return frozenset()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}


def load_tokenizer(model_path: str) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises StartupError when it cannot be read."""
    path = Path(model_path) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise StartupError(f"cannot read the tokenizer at {path}: {error}") from error
    # A file may carry settings of its training; a prompt is never truncated or padded here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
