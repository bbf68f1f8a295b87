"""`baton plan speculation`: its figures, its tables and its page."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.planner.model_shape import count_parameters
from cluster.planner.speculation_grid import (
    ACCEPTANCES,
    BATCHES,
    PassTimes,
    break_even_batch,
    speculation_cell,
)
from cluster.planner.speculation_report import describe_measurement, print_report, render_page
from engine.model.weights import tensor_shapes
from engine.model_config.config import padded_rows
from engine.model_config.families import parse_config
from engine.speculation.control.latency_curve import LatencyCurve
from protocol.performance.draft_choice import expected_tokens
from tests.engine.families import FAMILIES, SIZES

FREE = PassTimes(LatencyCurve(np.full(2000, 10e-3)), LatencyCurve(np.full(200, 1e-3)))
"""Rows cost nothing, as in the papers; a pass of the draft a tenth of a step."""

RIDGE = PassTimes(LatencyCurve(10e-3 + 1e-3 * np.maximum(0, np.arange(1, 2001) - 48)), None)
"""Rows are free up to 48, and cost a tenth of a step from there."""


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_where_rows_are_free_it_is_the_formula(acceptance: float) -> None:
    found = speculation_cell(FREE, 4, acceptance, most=8)
    # Leviathan, Kalman and Matias, theorem 3.8; a pass of the draft costs a tenth of a step.
    speedups = {n: expected_tokens(acceptance, n) / (1 + 0.1 * n) for n in range(1, 9)}
    best = max(speedups, key=speedups.__getitem__)
    assert found.nodes == best
    assert found.speedup == pytest.approx(speedups[best])
    assert found.tokens == pytest.approx(expected_tokens(acceptance, best))
    assert (found.plain_ms, found.verify_ms) == pytest.approx((10.0, 10.0))
    assert found.draft_ms == pytest.approx(best)


def test_beyond_the_ridge_it_does_not_pay() -> None:
    assert speculation_cell(RIDGE, 4, 0.5, most=8).speedup > 1.9
    full = speculation_cell(RIDGE, 64, 0.3, most=8)
    assert (full.nodes, full.tokens, full.speedup) == (0.0, 1.0, 1.0)
    ends = [break_even_batch(RIDGE, a, 8, 128) for a in ACCEPTANCES]
    assert ends == sorted(ends)
    assert 24 <= ends[0] < 64
    for acceptance, end in zip(ACCEPTANCES, ends, strict=True):
        assert speculation_cell(RIDGE, end, acceptance, 8).nodes > 0
        assert end == 128 or not speculation_cell(RIDGE, end + 1, acceptance, 8).nodes


STAIRS = PassTimes(
    LatencyCurve(np.interp([padded_rows(n) for n in range(1, 2001)], [1, 2000], [5e-3, 400e-3])),
    LatencyCurve(np.full(200, 1e-3)),
)
"""Rows are padded, as on a CPU: just above a step of the stairs, verifying costs nothing more."""


def test_up_to_where_it_pays_there_is_no_gap() -> None:
    for acceptance in ACCEPTANCES:
        pays = [bool(speculation_cell(STAIRS, b, acceptance, 8).nodes) for b in range(1, 129)]
        end = break_even_batch(STAIRS, acceptance, 8, 128)
        assert all(pays[:end]) and (end == 128 or not pays[end])
    assert not all(speculation_cell(STAIRS, b, 0.5, 8).nodes for b in (16, 32, 64))
    assert (
        speculation_cell(STAIRS, 97, 0.5, 8).nodes > 0
        and break_even_batch(STAIRS, 0.5, 8, 128) < 16
    )


def test_a_batch_is_drafted_no_more_than_a_step_takes() -> None:
    for batch, each in ((16, 8), (64, 4), (128, 2)):
        assert speculation_cell(PassTimes(FREE.model, None), batch, 0.9, most=8).nodes == each


def test_nothing_is_drafted_that_costs_more_than_it_brings() -> None:
    dear = PassTimes(FREE.model, LatencyCurve(np.full(200, 9e-3)))
    assert speculation_cell(dear, 1, 0.8, most=8).nodes == 0
    assert break_even_batch(dear, 0.8, 8, 128) == 0


def test_tables_and_page_tell_all() -> None:
    cells = [speculation_cell(RIDGE, b, a, 8) for b in BATCHES for a in ACCEPTANCES]
    even = {a: break_even_batch(RIDGE, a, 8, 128) for a in ACCEPTANCES}
    out = io.StringIO()
    measured = PassTimes(RIDGE.model, None, "an abacus")
    told = describe_measurement(measured, "a <model>", None, 8)
    print_report(Console(file=out, width=100), told, cells, even, 0.7)
    text = out.getvalue()
    assert "on an abacus" in text and "acceptance is 0.7" in text
    assert "Drafts cost nothing, as with n-grams." in " ".join(text.split())
    assert f"{speculation_cell(RIDGE, 8, 0.7, 8).speedup:.2f}" in text
    last = next(line for line in text.splitlines() if "pays up to" in line)
    assert str(even[0.3]) in last
    html = render_page(told, cells, even, 0.7)
    assert "on an abacus" in html and f"<td>pays up to</td><td>{even[0.3]}</td>" in html
    assert "a &lt;model&gt;" in html and "<model>" not in html
    assert "Speed-up over plain decoding" in html and "default-src 'none'" in html


def test_the_demo_model_is_measured(tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    call = ["plan", "speculation", "--json", "--threads", "1", "--tokens", "4"]
    done = CliRunner().invoke(app, [*call, "--acceptance", "0.95", "--html", str(html)])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {c["batch"] for c in told["cells"]} == set(BATCHES)
    assert set(told["pays_up_to"]) == {f"{a:g}" for a in (*ACCEPTANCES, 0.95)}
    plain = [c["plain_ms"] for c in told["cells"] if c["acceptance"] == 0.95]
    assert plain[0] > 0 and plain == sorted(plain)
    shown = html.read_text()
    assert "passes of baton-demo and of its draft model (draft)," in shown
    assert ", 1 thread, float32:" in shown


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "speculation", "--model", str(tmp_path)])
    assert done.exit_code == 1
    assert "config.json" in done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_a_checkpoint(family: str) -> None:
    prefix, changes = FAMILIES[family]
    raw = {**SIZES, **changes, "architectures": [f"{prefix}ForCausalLM"]}
    config = parse_config(raw, family)
    assert count_parameters(config) == sum(math.prod(shape) for _, shape in tensor_shapes(config))
