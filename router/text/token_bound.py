"""A lower bound of the tokens in a text, found without tokenizing it.

Every token stands for a limited number of bytes, so a text of many bytes has many tokens. A router
refuses a text that cannot fit the model by this bound, in milliseconds instead of seconds.

The bound needs a tokenizer that drops no byte of its input. ``TokenBound.of`` reads that from the
tokenizer's parts, and gives no bound (0) for parts that it does not know: BPE over bytes, or with a
byte fallback, behind parts that split, prepend, replace by something longer, or compose (NFC) is
known. Two sets of bytes are counted, and the larger result counts:

    all bytes       unknown where a token swallows white space beside it (``lstrip``, ``rstrip``)
    solid bytes     letters and digits of ASCII: a run of 128 spaces may be one token, while
                    letters and digits come in short tokens
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from router.text.detokenizer import byte_alphabet

_COMPOSED = 4
"""Most bytes that NFC or NFD turns into one: a Greek iota of 3 bytes with two marks of 2 bytes each
becomes a letter of 2, which is 3.5."""

_SOLID = (string.ascii_letters + string.digits).encode()
_NOT_SOLID = bytes(sorted(set(range(256)) - set(_SOLID)))
_KEEPING_SPLITS = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"}
"""Pre-tokenizers that keep every byte. ``Split`` and ``Punctuation`` do unless they remove."""


class TokenBound(NamedTuple):
    """Most bytes that one token of a tokenizer stands for; 0 where there is no bound."""

    all_bytes: int = 0
    solid_bytes: int = 0  # letters and digits of ASCII
    composes: bool = False  # the tokenizer composes characters, which changes non-ASCII text

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBound:
        """Return the bound for a tokenizer. Takes some 100 ms for a large vocabulary."""
        spec = json.loads(tokenizer.to_str())
        if not _keeps_all_bytes(spec):
            return cls()
        tokens = list(_tokens(tokenizer, spec))
        swallows = any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())
        longest = 0 if swallows else max(map(len, tokens), default=0)
        solid = max((len(token.translate(None, _NOT_SOLID)) for token in tokens), default=0)
        composes = any(step["type"] in ("NFC", "NFD") for step in _steps(spec["normalizer"]))
        return cls(longest, solid, composes)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that ``text`` has at least, without added special tokens."""
        data = text.encode(errors="surrogatepass")
        if self.composes and not text.isascii():
            return _parts(len(data), self.all_bytes * _COMPOSED)
        by_length = _parts(len(data), self.all_bytes)
        if not self.solid_bytes:
            return by_length
        return max(by_length, _parts(len(data.translate(None, _NOT_SOLID)), self.solid_bytes))


def _parts(size: int, most: int) -> int:
    return -(-size // most) if most else 0


def _tokens(tokenizer: Tokenizer, spec: dict[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of normalized text that each token stands for, or more."""
    alphabet = byte_alphabet()
    byte_level = any(step["type"] == "ByteLevel" for step in _steps(spec["pre_tokenizer"]))
    for piece in tokenizer.get_vocab(with_added_tokens=False):
        if byte_level and all(c in alphabet for c in piece):
            yield bytes([alphabet[c] for c in piece])
        else:
            yield piece.encode()
    for token in tokenizer.get_added_tokens_decoder().values():
        yield token.content.encode()
        if tokenizer.normalizer is not None:  # it is found in normalized text
            yield tokenizer.normalizer.normalize_str(token.content).encode()


def _keeps_all_bytes(spec: dict[str, Any]) -> bool:
    """Return whether every byte of a text is in one of its tokens."""
    return (
        all(map(_is_growing, _steps(spec["normalizer"])))
        and all(map(_is_keeping, _steps(spec["pre_tokenizer"])))
        and _covers_bytes(spec)
    )


def _covers_bytes(spec: dict[str, Any]) -> bool:
    """Return whether the model has a token for every byte, so that it drops and joins none."""
    model = spec["model"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    vocabulary: set[str] = set(model["vocab"])
    if any(step["type"] == "ByteLevel" for step in _steps(spec["pre_tokenizer"])):
        return vocabulary >= set(byte_alphabet())
    return bool(model["byte_fallback"]) and vocabulary >= {f"<0x{b:02X}>" for b in range(256)}


def _steps(part: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, sequences within sequences included."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    if part["type"] != "Sequence":
        return [part]
    return [step for nested in inner or () for step in _steps(nested)]


def _is_growing(step: dict[str, Any]) -> bool:
    """Return whether a normalizer only adds bytes, or composes characters."""
    if step["type"] == "Replace":
        old, new = step["pattern"].get("String"), step["content"]
        return bool(old) and all(
            len(_kept(new, drop)) >= len(_kept(old, drop)) for drop in (b"", _NOT_SOLID)
        )
    kind: str = step["type"]
    return kind in ("Prepend", "NFC", "NFD")


def _kept(text: str, drop: bytes) -> bytes:
    return text.encode().translate(None, drop)


def _is_keeping(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer only splits, or adds bytes."""
    if step["type"] in ("Split", "Punctuation"):
        behavior: str = step["behavior"]
        return behavior != "Removed"
    kind: str = step["type"]
    return kind in _KEEPING_SPLITS
