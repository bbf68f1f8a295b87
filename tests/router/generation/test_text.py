from __future__ import annotations

from tokenizers import Tokenizer

from router.generation.output_text import OutputText, TextPiece
from router.text.detokenizer import detokenizer_factory


def letters(tok: Tokenizer, text: str) -> list[int]:
    return [tok.token_to_id(c) for c in text]


def test_tokens_after_the_stop_string_do_not_count(tokenizer: Tokenizer) -> None:
    stream = OutputText(detokenizer_factory(tokenizer)(), ("cd",))
    assert stream.push(letters(tokenizer, "abc")) == TextPiece("ab", 3, False)
    assert stream.push(letters(tokenizer, "defg")) == TextPiece("", 1, True)


def test_without_a_hit_the_held_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    stream = OutputText(detokenizer_factory(tokenizer)(), ("cd",))
    assert stream.push(letters(tokenizer, "abc")).text == "ab"
    assert stream.flush() == TextPiece("c", 0, False)


def test_an_incomplete_character_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = OutputText(detokenizer_factory(tokenizer)(), ("b\ufffd",))
    assert stream.push(letters(tokenizer, "abð")).text == "a"
    assert stream.flush() == TextPiece("", 0, True)
