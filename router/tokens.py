"""Prompts to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from protocol.errors import StartupError

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
