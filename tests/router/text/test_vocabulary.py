from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from protocol.errors import StartupError
from router.text.detokenizer import detokenizer_factory
from router.text.vocabulary import load_tokenizer


def test_a_missing_tokenizer_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=str(tmp_path / "tokenizer.json")):
        load_tokenizer(str(tmp_path))


def test_a_file_that_cuts_or_fills_up_does_neither_here(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    trained = Tokenizer.from_str(tokenizer.to_str())
    trained.enable_truncation(2)
    trained.enable_padding(length=50)
    trained.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    ids = loaded.encode("a b c d e f").ids
    assert ids == tokenizer.encode("a b c d e f").ids
    assert 2 < len(ids) < 50


def test_the_demo_model_has_a_tokenizer_that_can_be_streamed() -> None:
    folder = Path(__file__).parents[3] / "engine/demo/target"
    loaded = load_tokenizer(str(folder))
    text = "def hello(self):\n    return '🦊 über'\n"
    ids = loaded.encode(text).ids
    detok = detokenizer_factory(loaded)()
    assert "".join(detok.push([i]) for i in ids) + detok.flush() == text
