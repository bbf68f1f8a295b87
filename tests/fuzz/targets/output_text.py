"""Stop strings (router/generation/output_text.py) against a search of the whole text."""

from __future__ import annotations

from collections.abc import Iterable

from router.generation.output_text import OutputText
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import Budget, FuzzTarget

_MOST_STOPS = 4  # as a request may have


class _Bytes:
    """A detokenizer whose tokens are the characters from 0 to 255, two of which hold others
    back: a zero is shown together with the next token."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, tokens: Iterable[int]) -> str:
        return "".join([self._one(token) for token in tokens])

    def push_one(self, token: int) -> tuple[str, int]:
        return self._one(token), 0

    def _one(self, token: int) -> str:
        if token == 0:
            self._held += "\0"
            return ""
        text, self._held = self._held + chr(token), ""
        return text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def fuzz_one(data: bytes) -> None:
    reader = ByteReader(data)
    keep, tracked, min_tokens = reader.number(2) == 1, reader.number(2) == 1, reader.number(8)
    repeated = 1 + reader.number(256)  # stop strings are longer than what tells of them
    stops = tuple(
        text
        for _ in range(reader.number(_MOST_STOPS + 1))
        if (text := (reader.piece(8) * repeated)[:4096].decode("latin-1"))
    )
    sizes = ByteReader(reader.piece(32))
    tokens = list(reader.rest())
    expected = _simple(tokens, stops, min_tokens, keep=keep)
    for batches in (sizes, ByteReader(b"")):
        found = _streamed(tokens, batches, stops, min_tokens, keep=keep, tracked=tracked)
        assert found == expected


def _streamed(
    tokens: list[int],
    sizes: ByteReader,
    stops: tuple[str, ...],
    min_tokens: int,
    *,
    keep: bool,
    tracked: bool,
) -> tuple[str, int]:
    """Return the text, and the tokens that were used until a stop string; all if there is none."""
    text = OutputText(_Bytes(), stops, min_tokens=min_tokens, keep_stop=keep, tracked=tracked)
    sent, at = [], 0
    while at < len(tokens):
        batch = tokens[at : at + 1 + (sizes.number(40) if sizes.left else 15)]
        piece = text.push(batch)
        assert piece.used == len(batch) or piece.stopped
        sent.append(piece.text)
        at += piece.used
        if piece.stopped:
            return "".join(sent), at
    sent.append(text.flush().text)
    return "".join(sent), at


def _simple(
    tokens: list[int], stops: tuple[str, ...], min_tokens: int, *, keep: bool
) -> tuple[str, int]:
    """The same by searching the text behind the first ``min_tokens`` tokens."""
    detokenizer = _Bytes()
    texts = [detokenizer.push((token,)) for token in tokens]
    tail = detokenizer.flush()
    before, after = "".join(texts[:min_tokens]), "".join(texts[min_tokens:])
    if len(tokens) <= min_tokens:
        return before + tail, len(tokens)
    whole = after + tail
    hits = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
    if not hits:
        return before + whole, len(tokens)
    end, begin = min(hits)
    used, length = min_tokens, 0
    while used < len(tokens) and length < end:
        length += len(texts[used])
        used += 1
    return before + whole[: end if keep else begin], used


TARGET = FuzzTarget(
    "output_text", fuzz_one, Budget(s_per_byte=4e-5, base_bytes=2 << 20), examples=80
)
