"""Token ids of one text become characters as they arrive.

Each choice has one ``Detokenizer``, made by the ``DetokenizerFactory`` of the router's
``Vocabulary``. The pieces of its text join to exactly
``tokenizer.decode(all_ids, skip_special_tokens=True)``, and each token is processed once. The
common method, which decodes a window again and compares, has neither property: a character of four
bytes or a run of invalid bytes makes the window grow or the pieces differ. This module implements
the two decoders that language models use:

    ByteLevel (GPT-2, Llama 3, Qwen)     token -> bytes -> UTF-8, incomplete tail held back
    SentencePiece (Llama 2, Mistral)     token -> text, or one byte <0xNN>; a run of bytes is text
                                         if all of it is UTF-8, else a replacement character each
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from protocol.errors import StartupError

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Detokenizer(Protocol):
    """The state of one text."""

    def push(self, tokens: Iterable[int]) -> str:
        """Return the text that these tokens complete."""

    def push_one(self, token: int) -> tuple[str, int]:
        """Return the text that one token completes, and how many characters at its beginning belong
        to earlier tokens only: they left a character incomplete that this token does not continue.
        """

    def flush(self) -> str:
        """Return the text of an incomplete end. Nothing may be pushed after it."""


class ByteLevelDetokenizer:
    """Detokenizer of byte-level BPE. ``table[token]`` is the token's bytes."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        table = self._table
        size = len(table)
        return self._decoder.decode(b"".join([table[t] for t in tokens if t < size]))

    def push_one(self, token: int) -> tuple[str, int]:
        held: bytes = self._decoder.getstate()[0]
        text = self.push((token,))
        if not held or not text.startswith(_REPLACEMENT):
            return text, 0
        # The model may have written the character itself; else it stands for held bytes.
        written = (held + self._table[token]).startswith(_REPLACEMENT.encode())
        return text, 0 if written else 1

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class SentencePieceDetokenizer:
    """Detokenizer of SentencePiece. ``table[token]`` is text, bytes for a byte token, or None for a
    token without text."""

    def __init__(self, table: list[str | bytes | None], strip: int) -> None:
        self._table = table
        self._strip = strip  # leading spaces of the whole text that are still to be dropped
        self._run = bytearray()

    def push(self, tokens: Iterable[int]) -> str:
        out = []
        for token in tokens:
            piece = self._table[token] if token < len(self._table) else None
            if isinstance(piece, bytes):
                self._run += piece
            elif piece is not None:
                out.append(self._end_run())
                out.append(piece)
        return self._stripped("".join(out))

    def push_one(self, token: int) -> tuple[str, int]:
        piece = self._table[token] if token < len(self._table) else None
        if not isinstance(piece, str):
            return self.push((token,)), 0
        before = self._stripped(self._end_run())
        return before + self.push((token,)), len(before)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            self._strip -= 1
            text = text[1:]
        return text


class DetokenizerFactory(NamedTuple):
    """Makes detokenizers that share one table."""

    new: Callable[[], Detokenizer]
    bytes_of: Callable[[int], bytes]  # what a token stands for by itself

    def __call__(self) -> Detokenizer:
        return self.new()


def detokenizer_factory(tokenizer: Tokenizer, *, skip_special: bool = True) -> DetokenizerFactory:
    """Return the factory for a tokenizer. Raises StartupError for an unsupported decoder."""
    stages = _stages(tokenizer)
    names = [stage["type"] for stage in stages]
    if names == ["ByteLevel"]:
        unicode_to_byte = byte_alphabet()
        byte_table = [_bytes_of(t, unicode_to_byte) for t in _pieces(tokenizer, skip_special)]
        return DetokenizerFactory(
            lambda: ByteLevelDetokenizer(byte_table),
            lambda t: byte_table[t] if t < len(byte_table) else b"",
        )
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and names[3:] in ([], ["Strip"]):
        old, new = stages[0]["pattern"].get("String"), stages[0]["content"]
        no_strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
        strip = stages[3] if len(stages) == 4 else no_strip
        if old is not None and strip["content"] == " " and strip["stop"] == 0:
            table = [_text_of(t, old, new) for t in _pieces(tokenizer, skip_special)]
            return DetokenizerFactory(
                lambda: SentencePieceDetokenizer(table, strip["start"]),
                lambda t: _encoded(table[t]) if t < len(table) else b"",
            )
    raise StartupError(
        f"the tokenizer's decoder is {names or 'missing'}; expected ByteLevel, or Replace,"
        " ByteFallback, Fuse and Strip"
    )


def _stages(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    spec = json.loads(tokenizer.decoder.__getstate__())
    if spec["type"] != "Sequence":
        return [spec]
    return list(spec["decoders"])


def _pieces(tokenizer: Tokenizer, skip_special: bool) -> list[str | None]:
    """The string of each token id; None for unused ids and for special tokens to be skipped."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    skipped = special if skip_special else set()
    return [None if i in skipped else tokenizer.id_to_token(i) for i in range(size)]


def byte_alphabet() -> dict[str, int]:
    """Map GPT-2's printable character for each byte back to the byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    stand_ins = {chr(b): b for b in plain}
    stand_ins.update({chr(256 + i): b for i, b in enumerate(others)})
    return stand_ins


def _bytes_of(piece: str | None, alphabet: dict[str, int]) -> bytes:
    if piece is None:
        return b""
    try:
        return bytes([alphabet[c] for c in piece])
    except KeyError:  # an added token is its own text
        return piece.encode()


def _text_of(piece: str | None, old: str, new: str) -> str | bytes | None:
    if piece is None:
        return None
    piece = piece.replace(old, new)
    byte = _BYTE_TOKEN.match(piece)
    return bytes([int(byte[1], 16)]) if byte else piece


def _encoded(piece: str | bytes | None) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece or b""
