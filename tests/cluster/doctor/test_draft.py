"""What is said beforehand of the draft model, and what it adds to the memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from cluster.doctor import draft
from cluster.doctor.subject import Pool, Wanted
from cluster.local.start_report import Reporter
from cluster.models import drafting, hub, models
from engine.execution.memory_footprint import footprint
from engine.ipc.spec import WITH_MODEL, SpeculationMethod, SpeculationSpec
from engine.model_config.checkpoint import load_config, read_shards
from protocol.errors import StartupError
from tests.cluster.doctor.wishes import SPEC, levels

DEMO = models.demo_path()
HEAD = 4096 * 96  # on a CPU it lies beside the embedding


def wanted(method: SpeculationMethod, folder: Path | str | None = None) -> Wanted:
    model_path = None if folder is None else str(folder)
    spec = SpeculationSpec(method=method, model_path=model_path)
    engine = msgspec.structs.replace(SPEC, speculation=spec)
    return Wanted(pools=(Pool("prefill", 1, SPEC), Pool("decode", 1, engine)))


def said(asked: Wanted) -> tuple[list[str], str]:
    findings = draft.judge(draft.collect(asked), asked)
    return levels(findings), " ".join(f.text for f in findings)


def test_nothing_is_said_while_it_is_off() -> None:
    assert said(wanted("off")) == ([], "")


def test_what_drafts() -> None:
    assert said(wanted("auto")) == (["ok"], "n-grams of prompt and output")
    for asked in (wanted("draft"), wanted("auto", DEMO.parent / "draft")):
        assert said(asked) == (["ok"], "draft: a draft model, 0.6 M parameters")


def test_a_draft_that_is_of_no_use_is_no_problem(tmp_path: Path) -> None:
    level, text = said(wanted("draft", tmp_path))
    assert level == ["note"] and "no *.safetensors" in text
    level, text = said(wanted("auto", tmp_path / "nowhere"))
    assert level == ["note"] and "nowhere" in text
    level, text = said(wanted("medusa", DEMO.parent / "draft"))
    assert level == ["note"] and "holds a draft model; expected Medusa heads" in text
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    level, text = said(wanted("draft", tmp_path))
    assert level == ["note"] and "is a pickle, which is never loaded" in text


def test_another_vocabulary_is_noted(tmp_path: Path) -> None:
    shutil.copytree(DEMO.parent / "draft", tmp_path / "draft")
    tokenizer = tmp_path / "draft" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"def"', '"fed"'))
    level, text = said(wanted("draft", tmp_path / "draft"))
    assert level == ["note"] and "its tokenizer is not that of" in text
    (tmp_path / "draft" / "config.json").write_text("{}")
    level, text = said(wanted("draft", tmp_path / "draft"))
    assert level == ["note"] and "config.json" in text


def test_its_weights_and_its_kv_are_counted() -> None:
    config, shards = load_config(DEMO), read_shards(DEMO)
    spec = SpeculationSpec(method="draft", model_path=str(DEMO.parent / "draft"))
    plain = footprint(SPEC, config, shards, "cpu")
    both = footprint(msgspec.structs.replace(SPEC, speculation=spec), config, shards, "cpu")
    own = load_config(DEMO.parent / "draft").kv_format("exact", "wide", 4).bytes_per_token
    assert both.kv_tokens == plain.kv_tokens
    assert both.kv - plain.kv == own * plain.kv_tokens
    own_weights = (both.weights - plain.weights) / 4
    assert own_weights == sum(read_shards(DEMO.parent / "draft").elements.values()) + HEAD
    lost = msgspec.structs.replace(SPEC, speculation=SpeculationSpec(method="eagle"))
    assert footprint(lost, config, shards, "cpu") == plain


class Notes(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.came: list[object] = []

    def __call__(self, event: object) -> None:
        self.came.append(event)


def test_the_demo_model_has_drafts_of_its_own() -> None:
    notes = Notes()
    for method in WITH_MODEL:
        own = drafting.resolve(SpeculationSpec(method=method), None, notes)
        assert own.model_path == str(DEMO.parent / method)
        other = drafting.resolve(SpeculationSpec(method=method), "other", notes)
        assert other.model_path is None
    assert not notes.came


def test_what_cannot_be_had_is_left_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    asked = SpeculationSpec(method="auto", model_path=str(tmp_path / "nowhere"))
    assert drafting.resolve(asked, None, notes) == asked
    assert not notes.came, "the check has said it"

    def unreachable(*_: object) -> Path:
        raise StartupError("the hub cannot be reached")

    monkeypatch.setattr(hub, "download", unreachable)
    away = SpeculationSpec(method="auto", model_path="nobody-here/nothing")
    assert drafting.resolve(away, None, notes) == away
    assert "speculation: the hub cannot be reached" in str(notes.came)
    monkeypatch.setattr(hub, "download", lambda *_: tmp_path)
    assert drafting.resolve(away, None, notes).model_path == str(tmp_path)
