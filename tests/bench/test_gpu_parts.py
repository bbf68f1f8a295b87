"""What the parts of ``bench.gpu`` are made of: requirements, placed sequences, frames, counts."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from bench.gpu.front import write_folder
from bench.gpu.models import (
    LLAMA_3_8B,
    drop_all,
    fill_pool,
    make_engine,
    pages_of,
    place,
    random_frame,
    random_model,
    timed_steps,
)
from bench.gpu.part import PartContext, PartJob
from bench.gpu.parts.kv_arrival import late_ratio
from bench.gpu.parts.suites import marked_paths, read_counts
from bench.gpu.random_engine import declare_shards, read_stamps
from bench.gpu.requirements import NeededPackage, how_to_install, missing_packages
from bench.gpu.results import ROOT
from engine.kv_cache.kv_format import Codec, KVPiece
from engine.kv_cache.kv_pool import Fp8Pool, make_pool
from engine.model_config.families import parse_config
from engine.scheduling.sequence import Phase

CPU = torch.device("cpu")


@pytest.fixture
def context(tmp_path: Path) -> PartContext:
    return PartContext(PartJob("none:none", "cpu", tiny=True), tmp_path / "rows")


def test_the_full_shape_is_llama_3_8b() -> None:
    c = parse_config(LLAMA_3_8B, "test")
    layer = c.hidden_size * (2 * c.heads + 2 * c.kv_heads) * c.head_dim
    layer += 3 * c.hidden_size * c.intermediate_size
    parameters = c.layers * layer + 2 * c.vocab_size * c.hidden_size
    assert round(parameters / 1e9, 1) == 8.0


def test_placed_sequences_decode_over_random_kv(context: PartContext) -> None:
    batch, length, steps = 3, 70, 5
    model = random_model(context, 128)
    pages = pages_of(batch, 100)
    engine = make_engine(model, pages=pages, max_batch=batch, chunk=32, max_model_len=128)
    fill_pool(engine)
    assert isinstance(engine.pool, Fp8Pool)
    assert all(engine.pool.payload[:, page].any() for page in range(pages))
    place(engine, batch, length, new_tokens=steps + 3)
    assert len(timed_steps(engine, 1, steps)) == steps
    running = engine.scheduler.decoding
    assert [len(s.tokens) for s in running] == [length + 1 + 1 + steps] * batch
    assert {s.phase for s in running} == {Phase.DECODE}
    drop_all(engine)
    assert engine.manager.available == pages


def test_sequences_that_do_not_fit_are_named(context: PartContext) -> None:
    model = random_model(context, 128)
    engine = make_engine(model, pages=4, max_batch=3, chunk=32, max_model_len=128)
    with pytest.raises(AssertionError, match="1 of 3 sequences fit"):
        place(engine, 3, 70, new_tokens=2)


@pytest.mark.parametrize("storage", ["wide", "fp8"])
def test_random_frames_are_valid_kv(context: PartContext, storage: str) -> None:
    config = random_model(context, 64).config
    kv = config.kv_format("fp8", "fp8" if storage == "fp8" else "wide", 4)
    frame = random_frame(kv, 3, torch.float32, CPU)
    pool = make_pool(kv, 5, torch.float32, CPU)
    pool.write(KVPiece(0, kv.layers, 0, 3), [4, 0, 2], frame, kv.stored)
    values = pool.layer(1).gather(torch.tensor([4, 0, 2]))
    assert values.isfinite().all() and values.std() > 0.1
    assert kv.stored is (Codec.FP8 if storage == "fp8" else Codec.RAW)


def test_missing_and_old_packages_are_named() -> None:
    needed = (
        NeededPackage("torch", (2, 0), "everything"),
        NeededPackage("torch", (99,), "the future"),
        NeededPackage("no-such-package", (1, 2), "nobody"),
    )
    lines = missing_packages(needed)
    assert lines[0].startswith("torch>=99: 2.")
    assert lines[1] == "no-such-package>=1.2: not installed; used by nobody"
    assert "--find-links wheels 'torch>=99' 'no-such-package>=1.2'" in how_to_install(lines)
    assert missing_packages() == []


def test_late_steps_are_compared_with_the_steps_around_them() -> None:
    growing = [1.0 + 0.001 * i for i in range(1000)]
    assert late_ratio(growing) < 1.05  # their percentile over all is 1.33 of their median
    spikes = [2.0 * taken if i % 20 == 0 else taken for i, taken in enumerate(growing)]
    assert late_ratio(spikes) == pytest.approx(2.0, rel=0.05)


def test_tests_with_the_mark_are_found() -> None:
    paths = marked_paths(ROOT / "tests")
    assert "tests/gpu" in paths and "tests/engine/sampling/test_sampling_gpu.py" in paths
    assert not any(path.startswith("tests/gpu/") for path in paths)


def test_the_counts_of_a_report() -> None:
    report = (
        '<testsuites><testsuite tests="7" failures="2" errors="1" skipped="1" time="3.9"/>'
        '<testsuite tests="1" failures="0" errors="0" skipped="0" time="0.2"/></testsuites>'
    )
    expected = {"tests": 8, "failures": 2, "errors": 1, "skipped": 1, "time": 4}
    assert read_counts(report) == expected


def test_the_declared_weights_are_those_of_the_model(tmp_path: Path) -> None:
    shards = declare_shards(write_folder(tmp_path, LLAMA_3_8B))
    assert round(sum(shards.elements.values()) / 1e9, 2) == 8.03


def test_a_stamp_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "stamps"
    path.write_bytes(struct.pack("<dd", 1.5, 2.5) + b"\0\0\0")
    assert read_stamps(path) == [1.5, 2.5]
