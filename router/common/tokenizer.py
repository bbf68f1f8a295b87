"""The tokenizer of the model that is served, and what its tokens say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from protocol.errors import StartupError
from router.common.detokenizer import Detokenizer, detokenizers

_NAMES = 1 << 15
"""Tokens whose names are kept."""


class Vocabulary:
    """Its tables are built at the start: large vocabularies take some 100 ms."""

    def __init__(self, tokenizer: Tokenizer, eos: frozenset[int] = frozenset()) -> None:
        """Raises StartupError for a tokenizer whose decoder is not known."""
        self.tokenizer = tokenizer
        self.eos = eos  # tokens that end a text, special or not
        self._plain = detokenizers(tokenizer)
        self._all = detokenizers(tokenizer, skip_special=False)
        self.name_of: Callable[[int], str] = lru_cache(_NAMES)(self._name)
        """A token as text, part of a character as ``bytes:\\xf0``: as OpenAI names it."""
        self.octets_of: Callable[[int], list[int]] = lru_cache(_NAMES)(self._octets)
        """The numbers of its bytes; not to be changed."""

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        return self._plain() if skip_special else self._all()

    def says_nothing(self, token: int, *, skip_special: bool = True) -> bool:
        """The token is no part of any text."""
        return not (self._plain if skip_special else self._all).bytes_of(token)

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for by itself; a special one for its name."""
        return self._all.bytes_of(token)

    def _name(self, token: int) -> str:
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _octets(self, token: int) -> list[int]:
        return list(self.bytes_of(token))


def load_vocabulary(tokenizer: Tokenizer, model_path: str) -> Vocabulary:
    """Raises StartupError for a folder whose files cannot be used."""
    return Vocabulary(tokenizer, _eos(Path(model_path)))


def _eos(folder: Path) -> frozenset[int]:
    """As the engine reads them: of ``generation_config.json``, else of ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        ids = _read(folder / name).get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            return frozenset(i for i in listed if type(i) is int)
    return frozenset()


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}


# MERGED router.tokens
# Prompts to token ids.

LONG_PROMPT = 8192
"""Characters from which a prompt is tokenized in a thread (some 8 ms): streams must not wait."""


def load_tokenizer(model_path: str) -> Tokenizer:
    """The tokenizer in a model's folder. Raises StartupError when there is none to read."""
    path = Path(model_path) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise StartupError(f"cannot read the tokenizer at {path}: {error}") from error
    # A file may carry the settings of its training; a prompt is never cut or filled up here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


async def encode(
    tokenizer: Tokenizer,
    prompt: str,
    *,
    special: bool = True,
    room: Callable[[int], None] | None = None,
) -> list[int]:
    """Token ids of a prompt. ``special``: with the tokens that the model wants in front. ``room``
    gets their number, and may raise: making a list of millions keeps the interpreter lock.

    Raises UnicodeEncodeError for what is no text, where tokenizers say that it is no string."""
    if not prompt.isascii():
        prompt.encode()
    if len(prompt) < LONG_PROMPT:
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=special).ids
        return ids
    # Only the batch call lets go of the interpreter lock.
    [encoding] = await asyncio.to_thread(
        tokenizer.encode_batch_fast, [prompt], add_special_tokens=special
    )
    if room is not None:
        room(len(encoding))
    of_long: list[int] = encoding.ids
    return of_long
