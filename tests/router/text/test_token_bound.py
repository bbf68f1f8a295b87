"""The lower bound of the tokens in a text is one, for every tokenizer."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer

from cluster.models.locate import demo_path
from router.text.token_bound import TokenBound
from router.text.vocabulary import load_tokenizer
from tests.router.openai.chat.toy import byte_level, sentence_piece

PIECES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "def hello(self): return 1\n",
            " " * 60,
            "\n" + " " * 44,
            "return",
            "K\u0327",
            "\u1fbe\u0308\u0301",
        ]
    ),
    st.sampled_from(
        ["\u1100\u1161\u11a8" * 5, "<|im_end|>", "new token é", "🦊", "  <s>  ", "aaaa", "-" * 30]
    ),
)
TEXTS = st.lists(PIECES, max_size=30).map("".join)


def composing() -> Tokenizer:
    """As Qwen's."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def swallowing() -> Tokenizer:
    """As Phi's: special tokens take the white space beside them."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = sentence_piece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "demo": lambda: load_tokenizer(str(demo_path())),
    "byte-level": byte_level,
    "sentence-piece": sentence_piece,
    "metaspace": metaspace,
    "composing": composing,
    "swallowing": swallowing,
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: make() for name, make in KINDS.items()}


@pytest.fixture(scope="module")
def bounds(tokenizers: dict[str, Tokenizer]) -> dict[str, TokenBound]:
    return {name: TokenBound.of(tokenizer) for name, tokenizer in tokenizers.items()}


@given(kind=st.sampled_from(sorted(KINDS)), text=TEXTS)
def test_no_text_has_fewer_tokens(
    tokenizers: dict[str, Tokenizer], bounds: dict[str, TokenBound], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    count = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert bounds[kind].least_tokens(text) <= count


@given(
    kind=st.sampled_from(sorted(KINDS)), text=st.sampled_from([" " * 99, "a" * 999, "é \n" * 99])
)
def test_no_text_with_tokens_that_swallow_has_fewer(
    tokenizers: dict[str, Tokenizer], bounds: dict[str, TokenBound], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    spread = f"{text}<|end|>{text}<s>{text}"
    count = len(tokenizer.encode(spread, add_special_tokens=False).ids)
    assert bounds[kind].least_tokens(spread) <= count


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_a_useful_bound(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text = "def hello(self): return 1\n" * 1000
    count = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert TokenBound.of(tokenizer).least_tokens(text) > count / 30


def test_eight_mebibytes_are_bounded_in_milliseconds(tokenizers: dict[str, Tokenizer]) -> None:
    bound = TokenBound.of(tokenizers["demo"])
    for unit in ("a", "🦊", "def f(): "):
        text = unit * ((8 << 20) // len(unit.encode()))
        start = time.thread_time()
        assert bound.least_tokens(text) > 100_000
        assert time.thread_time() - start < 0.2, "some 15 ms"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", normalizers.Lowercase()),
        ("normalizer", normalizers.NFKC()),
        ("normalizer", normalizers.Strip()),
        ("normalizer", normalizers.Replace("aa", "a")),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        (
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()]
            ),
        ),
        ("model", models.BPE()),
        ("model", models.WordLevel({"a": 0}, unk_token="a")),
    ],
    ids=str,
)
def test_what_may_drop_text_gives_no_bound(part: str, value: Normalizer | Any) -> None:
    tokenizer = byte_level()
    setattr(tokenizer, part, value)
    assert TokenBound.of(tokenizer) == TokenBound()
    assert TokenBound().least_tokens("x" * 999) == 0


def test_a_byte_that_the_vocabulary_lacks_gives_no_bound() -> None:
    state = json.loads(byte_level().to_str())
    del state["model"]["vocab"]["!"]
    state["model"]["merges"] = []
    assert TokenBound.of(Tokenizer.from_str(json.dumps(state))) == TokenBound()


def test_composing_turns_four_bytes_into_one_at_most() -> None:
    """Characters that compose, each part in its longest spelling."""
    composed = [
        character
        for character in map(chr, [*range(0xD800), *range(0xE000, 0x30000)])
        if unicodedata.decomposition(character) or "가" <= character <= "힣"
    ]
    longest: dict[str, int] = {}
    for character in composed:
        parts = unicodedata.normalize("NFD", character)
        longest[parts] = max(longest.get(parts, len(parts.encode())), len(character.encode()))
    for character in composed:
        parts = unicodedata.normalize("NFD", character)
        size = sum(longest.get(part, len(part.encode())) for part in parts)
        assert size <= 4 * len(unicodedata.normalize("NFC", character).encode()), parts
