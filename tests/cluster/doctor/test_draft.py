"""What is said beforehand of the draft model, and what it adds to the memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from bench.lib.settings import speculation_settings
from cluster.doctor import draft
from cluster.doctor.subject import DoctorSubject, SubjectPool
from cluster.local.start_report import StartReporter
from cluster.models import download, drafting, locate
from engine.ipc.settings import METHODS_WITH_MODEL, SpeculationMethod
from engine.memory.memory_footprint import estimate_footprint
from engine.model_config.checkpoint import load_config, read_shards
from protocol.errors import StartupError
from tests.cluster.doctor.subjects import SPEC, levels

DEMO = locate.demo_path()
HEAD = 4096 * 96  # on a CPU it lies beside the embedding


def wanted(method: SpeculationMethod, folder: Path | str | None = None) -> DoctorSubject:
    model_path = None if folder is None else str(folder)
    spec = speculation_settings(method, model_path)
    engine = msgspec.structs.replace(SPEC, speculation=spec)
    return DoctorSubject(pools=(SubjectPool("prefill", 1, SPEC), SubjectPool("decode", 1, engine)))


def said(asked: DoctorSubject) -> tuple[list[str], str]:
    findings = draft.judge(draft.collect(asked), asked)
    return levels(findings), " ".join(f.text for f in findings)


def test_no_finding_while_speculation_is_off() -> None:
    assert said(wanted("off")) == ([], "")


def test_finding_names_the_draft() -> None:
    assert said(wanted("auto")) == (["ok"], "n-grams of prompt and output")
    for asked in (wanted("draft"), wanted("auto", DEMO.parent / "draft")):
        assert said(asked) == (["ok"], "draft: a draft model, 0.6 M parameters")


def test_unusable_draft_is_only_a_note(tmp_path: Path) -> None:
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


def test_memory_includes_the_draft() -> None:
    config, shards = load_config(DEMO), read_shards(DEMO)
    spec = speculation_settings("draft", str(DEMO.parent / "draft"))
    plain = estimate_footprint(SPEC, config, shards, "cpu")
    both = estimate_footprint(
        msgspec.structs.replace(SPEC, speculation=spec), config, shards, "cpu"
    )
    own = load_config(DEMO.parent / "draft").kv_format("exact", "wide", 4).bytes_per_token
    assert both.kv_tokens == plain.kv_tokens
    assert both.kv - plain.kv == own * plain.kv_tokens
    own_weights = (both.weights - plain.weights) / 4
    assert own_weights == sum(read_shards(DEMO.parent / "draft").elements.values()) + HEAD
    lost = msgspec.structs.replace(SPEC, speculation=speculation_settings("eagle"))
    assert estimate_footprint(lost, config, shards, "cpu") == plain


class Notes(StartReporter):
    def __init__(self) -> None:
        super().__init__()
        self.came: list[object] = []

    def __call__(self, event: object) -> None:
        self.came.append(event)


def test_demo_model_has_its_own_draft() -> None:
    notes = Notes()
    for method in METHODS_WITH_MODEL:
        own = drafting.resolve_draft(speculation_settings(method), None, notes)
        assert own.model_path == str(DEMO.parent / method)
        other = drafting.resolve_draft(speculation_settings(method), "other", notes)
        assert other.model_path is None
    assert not notes.came


def test_draft_that_cannot_be_downloaded_is_left_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    asked = speculation_settings("auto", str(tmp_path / "nowhere"))
    assert drafting.resolve_draft(asked, None, notes) == asked
    assert not notes.came, "the check has said it"

    def unreachable(*_: object) -> Path:
        raise StartupError("the hub cannot be reached")

    monkeypatch.setattr(download, "download_snapshot", unreachable)
    away = speculation_settings("auto", "nobody-here/nothing")
    assert drafting.resolve_draft(away, None, notes) == away
    assert "speculation: the hub cannot be reached" in str(notes.came)
    monkeypatch.setattr(download, "download_snapshot", lambda *_: tmp_path)
    assert drafting.resolve_draft(away, None, notes).model_path == str(tmp_path)
