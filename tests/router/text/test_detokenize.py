from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from protocol.errors import StartupError
from router.text.detokenizer import detokenizer_factory

TEXTS = st.text(max_size=20) | st.sampled_from(["👩‍👩‍👧", "é", "\ufffd", "नमस्ते", "  ", "\r\n"])


def streamed(tok: Tokenizer, ids: list[int], cuts: list[int]) -> str:
    """The ids in pieces of the given sizes, the rest one by one."""
    detok = detokenizer_factory(tok)()
    pieces, at = [], 0
    for size in [*cuts, *[1] * len(ids)]:
        pieces.append(detok.push(ids[at : at + size]))
        at += size
    return "".join(pieces) + detok.flush()


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    words = ["<unk>", "</s>", "▁", "▁a", "b", "▁▁", "é", "🦊", "<0x", "-->"]
    vocab = {w: i for i, w in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tok.add_special_tokens([AddedToken("</s>", special=True)])
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tok


@given(ids=st.lists(st.integers(0, 340), max_size=60), cuts=st.lists(st.integers(0, 5), max_size=9))
def test_random_ids_join_to_what_the_tokenizer_decodes(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    assert streamed(tokenizer, ids, cuts) == tokenizer.decode(ids, skip_special_tokens=True)


@given(texts=st.lists(TEXTS, max_size=6), cut=st.integers(0, 8), size=st.integers(1, 4))
def test_text_cut_inside_a_character(
    tokenizer: Tokenizer, texts: list[str], cut: int, size: int
) -> None:
    ids = tokenizer.encode("".join(texts)).ids
    ids = ids[: max(0, len(ids) - cut)]
    assert streamed(tokenizer, ids, [size] * len(ids)) == tokenizer.decode(ids)


@given(
    ids=st.lists(st.integers(0, 9) | st.integers(0, 280), max_size=40),
    cuts=st.lists(st.integers(0, 5), max_size=9),
)
def test_sentencepiece(sentencepiece: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    assert streamed(sentencepiece, ids, cuts) == sentencepiece.decode(ids)


@given(text=TEXTS, rest=st.binary(max_size=4))
def test_sentencepiece_bytes(sentencepiece: Tokenizer, text: str, rest: bytes) -> None:
    ids = [10 + byte for byte in text.encode() + rest]
    assert streamed(sentencepiece, [3, *ids, 4, *ids], []) == sentencepiece.decode(
        [3, *ids, 4, *ids]
    )


@given(ids=st.lists(st.integers(0, 340), max_size=40))
def test_one_by_one_it_is_the_same_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = detokenizer_factory(tokenizer)()
    pushed = [stream.push_one(i) for i in ids]
    assert "".join(text for text, _ in pushed) + stream.flush() == tokenizer.decode(ids)
    assert all(text[:before] in ("", "\ufffd") for text, before in pushed)


def test_bytes_of_a_run_come_before_the_token_that_ends_it(sentencepiece: Tokenizer) -> None:
    stream = detokenizer_factory(sentencepiece)()
    piece = next(i for i in range(sentencepiece.get_vocab_size()) if len(stream.push_one(i)[0]) > 1)
    new = detokenizer_factory(sentencepiece)()
    byte = {n: sentencepiece.token_to_id(f"<0x{n:02X}>") for n in (0xC3, 0xA9)}
    new.push_one(piece)
    assert [new.push_one(byte[0xC3]), new.push_one(byte[0xA9])] == [("", 0), ("", 0)]
    text, before = new.push_one(piece)
    assert text[:before] == "é" and len(text) > before
    new.push_one(byte[0xC3])
    assert new.push_one(piece)[1] == 1


def test_no_piece_holds_part_of_a_character(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(c) for c in "ðŁ¦Ĭ"]  # the four bytes of a fox
    detok = detokenizer_factory(tokenizer)()
    assert [detok.push([i]) for i in ids] == ["", "", "", "🦊"]
    assert detok.flush() == ""


def test_an_incomplete_end_is_flushed(tokenizer: Tokenizer) -> None:
    detok = detokenizer_factory(tokenizer)()
    assert detok.push([tokenizer.token_to_id(c) for c in "ðŁ"]) == ""
    assert detok.flush() == "\ufffd"


def test_cost_grows_with_the_text_and_not_with_its_square(tokenizer: Tokenizer) -> None:
    detok = detokenizer_factory(tokenizer)()
    invalid = tokenizer.token_to_id("ł")  # a continuation byte: windows that decode again grow

    def seconds(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            detok.push((invalid,))
        return time.thread_time() - start

    seconds(1000)
    assert seconds(40_000) < 40 * max(seconds(4000), 0.002)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_an_unknown_decoder_is_refused_by_name(decoder: decoders.Decoder | None) -> None:
    tok = Tokenizer(models.BPE())
    if decoder is not None:
        tok.decoder = decoder
    with pytest.raises(StartupError, match="missing" if decoder is None else "WordPiece"):
        detokenizer_factory(tok)
