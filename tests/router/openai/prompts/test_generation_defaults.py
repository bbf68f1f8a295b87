from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import StartupError
from router.openai.prompts.generation_defaults import GenerationDefaults, load_generation_defaults


def load(folder: Path, config: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return load_generation_defaults(str(folder))


def test_values_that_no_author_has_chosen_are_not_taken(tmp_path: Path) -> None:
    unset = {"temperature": 1.0, "top_p": 1, "top_k": 50, "min_p": None, "repetition_penalty": 1.0}
    assert load(tmp_path, {**unset, "max_length": 20}) == GenerationDefaults()
    assert load_generation_defaults(str(tmp_path / "none")) == GenerationDefaults()
    assert load(tmp_path, []) == GenerationDefaults()


def test_a_value_out_of_range_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"temperature": 3, "top_p": "x", "top_k": 20, "min_p": True, "max_new_tokens": 0}
    assert load(tmp_path, config) == GenerationDefaults({"top_k": 20})
    assert "temperature is out of range and not used: 3" in caplog.text
    assert len(caplog.records) == 3


def test_what_a_client_sends_comes_first() -> None:
    defaults = GenerationDefaults({"temperature": 0.5, "top_k": 20})
    assert defaults.fill({"temperature": 0, "n": 1}) == {"temperature": 0, "top_k": 20, "n": 1}
    assert defaults.fill({"top_k": None}) == {"temperature": 0.5, "top_k": 20}


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(StartupError, match=r"generation_config\.json"):
        load_generation_defaults(str(tmp_path))
