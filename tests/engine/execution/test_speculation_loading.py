"""From settings to an engine that speculates, and what becomes of a draft that is of no use."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.lib.engines import engine_config
from bench.lib.settings import engine_settings
from engine.batching.attention_metadata import PackedBatch
from engine.execution.engine import Engine
from engine.execution.loading import LoadedEngine, load_engine
from engine.execution.speculation_loading import dummy_pass, load_speculation
from engine.execution.warm_up import OnProgress
from engine.ipc.settings import SpeculationMethod, SpeculationSettings
from engine.model.decoder import DecoderModel
from engine.process.meter import StepMeter
from engine.scheduling.step_policy import plan_decode_step
from engine.speculation.control.controller import Controller
from engine.speculation.control.exploration import MAX_WAIT_STEPS
from tests.engine.conftest import drain, request
from tests.engine.families import save
from tests.engine.heads import (
    EAGLE3_CONFIG,
    EAGLE_CONFIG,
    eagle3_state,
    eagle_state,
    medusa_state,
    write,
)

PROMPT = [5, 6, 7, 8] * 12


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of one layer."""
    return save(tmp_path_factory.mktemp("small"), num_hidden_layers=1)


def loaded(
    target: Path,
    method: SpeculationMethod,
    folder: Path | None = None,
    progress: OnProgress = lambda _what, _done: None,
) -> LoadedEngine:
    model_path = None if folder is None else str(folder)
    spec = engine_settings(
        str(target),
        device="cpu",
        threads=1,
        kv_tokens=2048,
        max_batch=4,
        prefill_chunk=64,
        max_model_len=512,
        kv_precision="exact",
        speculation=SpeculationSettings(method=method, model_path=model_path, max_tokens=4),
    )
    return load_engine(spec, plan_decode_step, progress)


def text(engine: Engine) -> list[int]:
    engine.generate(1, request("a", PROMPT, max_tokens=40))
    return drain(engine)[1]


def test_only_a_draft_model_is_reported_as_loading(tiny_folder: Path, small: Path) -> None:
    stages: list[str] = []
    loaded(tiny_folder, "ngram", progress=lambda what, _: stages.append(what))
    assert stages and "loading the draft model" not in stages
    loaded(tiny_folder, "draft", small, progress=lambda what, _: stages.append(what))
    assert "loading the draft model" in stages


def test_every_method_gives_the_same_text(
    tiny: DecoderModel, tiny_folder: Path, small: Path, tmp_path: Path
) -> None:
    plain = loaded(tiny_folder, "off")
    assert plain.engine.speculator is None and plain.ready.speculation == "off"
    said = text(plain.engine)
    medusa = write(tmp_path / "medusa", medusa_state(tiny), {})
    eagle = write(tmp_path / "eagle", eagle_state(tiny), EAGLE_CONFIG)
    ways: list[tuple[SpeculationMethod, Path | None, str]] = [
        ("ngram", None, "ngram"),
        ("auto", None, "ngram"),
        *(("draft", small, "draft"), ("auto", small, "draft")),
        *(("medusa", medusa, "medusa"), ("auto", medusa, "medusa"), ("auto", eagle, "eagle")),
    ]
    for method, folder, name in ways:
        one = loaded(tiny_folder, method, folder)
        speculator = one.engine.speculator
        assert speculator is not None and isinstance(speculator.lengths, Controller)
        assert one.ready.speculation == name
        assert speculator.proposer is not None and speculator.proposer.most == 4
        assert one.engine.manager.available == one.engine.manager.pages
        assert text(one.engine) == said


def broken(kind: str, small: Path, folder: Path) -> Path:
    """A folder that holds no draft of the target."""
    if kind == "nothing there":
        return folder / "nowhere"
    shutil.copytree(small, folder / "draft")
    draft = folder / "draft"
    weights = draft / "model.safetensors"
    if kind == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "a pickle":
        weights.rename(draft / "pytorch_model.bin")
    elif kind == "not finite":
        state = load_file(weights)
        state["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
        save_file(state, weights)
    elif kind == "no config":
        (draft / "config.json").unlink()
    else:
        shutil.rmtree(draft)
        save(draft, num_hidden_layers=1, vocab_size=400)
    return draft


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nothing there", "no such folder"),
        ("cut short", "but its header says"),
        ("a pickle", "is a pickle, which is never loaded"),
        ("no config", "config.json: cannot be read"),
        ("not finite", "tensor model.layers.0.mlp.up_proj.weight has values that are not finite"),
        ("another vocabulary", "vocabulary of 400 tokens"),
    ],
)
def test_engine_serves_without_a_loadable_draft(
    kind: str, why: str, tiny_folder: Path, small: Path, tmp_path: Path
) -> None:
    one = loaded(tiny_folder, "auto", broken(kind, small, tmp_path))
    assert one.engine.speculator is None
    assert one.ready.speculation.startswith("dropped: ") and why in one.ready.speculation
    assert len(text(one.engine)) == 40
    meter = StepMeter(one.engine, lambda: 0.0, one.speculation)
    assert meter.beat().speculation == one.speculation
    assert meter.beat().counters.speculation.load_failures == 1


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_heads_that_are_not_finite_are_refused(
    kind: str, value: float, tiny: DecoderModel, tiny_folder: Path, tmp_path: Path
) -> None:
    state, config = {
        "medusa": (medusa_state(tiny), {}),
        "eagle": (eagle_state(tiny), EAGLE_CONFIG),
        "eagle3": (eagle3_state(tiny), EAGLE3_CONFIG),
    }[kind]
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            continue
        spoilt = {**state, name: tensor.clone()}
        spoilt[name].view(-1)[-1] = value
        write(tmp_path, spoilt, config)
        engine = Engine(tiny, engine_config(pages=8, max_batch=2, chunk=64), plan_decode_step)
        asked = SpeculationSettings(method="auto", model_path=str(tmp_path), max_tokens=4)
        told = load_speculation(asked, engine, tiny_folder)
        assert f"tensor {name} has values that are not finite in float32" in str(told)


def test_heads_are_refused_as_draft_and_a_draft_as_heads(tiny_folder: Path, small: Path) -> None:
    assert "expected Medusa heads" in loaded(tiny_folder, "medusa", small).ready.speculation


def test_proposer_that_fails_while_drafting_is_counted_once(tiny_folder: Path, small: Path) -> None:
    one = loaded(tiny_folder, "draft", small)
    speculator = one.engine.speculator
    assert speculator is not None and speculator.proposer is not None
    alive = weakref.ref(speculator.proposer)
    meter = StepMeter(one.engine, lambda: 0.0, one.speculation)
    assert meter.beat().speculation.active

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    speculator.proposer.propose = fails  # type: ignore[method-assign, assignment]
    one.engine.generate(1, request("a", PROMPT, max_tokens=200))
    while step := one.engine.plan():
        meter.run(step)
    for beat in (meter.beat(), meter.beat()):
        assert str(beat.speculation) == "dropped: RuntimeError: out of memory"
        assert beat.counters.speculation.crashes == 1
        assert beat.counters.generated_tokens == 200 and beat.profile is None
    assert beat.counters.decode_rows == 199
    assert alive() is None, "its weights and its pool take memory that nobody uses"


def test_beats_report_the_speedup_of_drafts(tiny_folder: Path) -> None:
    one = loaded(tiny_folder, "draft", tiny_folder)  # the model itself: every draft is right
    meter = StepMeter(one.engine, lambda: 0.0, one.speculation)
    requests = 0
    # A first trial on a machine that is busy elsewhere may bring nothing; the next one comes within
    # MAX_WAIT_STEPS.
    while not meter.beat().counters.speculation.drafts and 119 * requests < 2 * MAX_WAIT_STEPS:
        requests += 1
        one.engine.generate(requests, request("a", PROMPT, max_tokens=120))
        while step := one.engine.plan():
            meter.run(step)
    beat = meter.beat()
    spec = beat.counters.speculation
    assert spec.drafts > 0 and spec.accepted_tokens == spec.draft_tokens
    assert beat.counters.decode_rows + spec.accepted_tokens == 119 * requests
    profile = beat.profile
    assert profile is not None or spec.drafts < 8, "a few drafts tell no acceptance"
    # It is a mean over the decisions, of which the first ones knew only a few drafts.
    assert profile is None or (profile.is_valid and profile.accept[0] > 0.6)


def test_measured_pass_computes_the_requested_rows(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(tiny_folder, "off").engine
    seen: list[int] = []
    hidden = engine.model.hidden

    def spy(batch: PackedBatch, *rest: Any) -> Tensor:
        seen.append(len(batch.tokens))
        return hidden(batch, *rest)

    monkeypatch.setattr(engine.model, "hidden", spy)
    for rows in (1, 7, 3000):  # more than the pool has slots
        dummy_pass(engine)(rows)
    assert seen == [1, 7, 3000]
    assert engine.manager.available == engine.manager.pages
