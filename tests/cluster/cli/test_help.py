"""The help of all commands is readable on a terminal of 80 columns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app

REPOSITORY = Path(__file__).parents[3]
OF_A_CLUSTER = [
    "up",
    "down",
    "scale",
    "status",
    "monitoring",
    "doctor",
    "config",
    "worker",
    "router",
    "autoscale",
]


def help_of(*command: str) -> str:
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}, color=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("command", OF_A_CLUSTER)
def test_commands_of_a_cluster_take_its_name(command: str) -> None:
    text = help_of(command)
    assert "--cluster " in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_sentences_fill_the_lines_of_the_overview() -> None:
    text = help_of()
    assert "workers from one pool to the other, and reports" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("command", OF_A_CLUSTER)
def test_names_of_options_are_whole(command: str) -> None:
    text = help_of(command)
    assert "…" not in text
    if command == "up":
        assert "--autoscaler-prometheus-url TEXT\n" in text
        assert "--no-autoscaler-loans\n" in text
        assert "docs/operations.md" in text


def test_switches_take_no_value() -> None:
    (line,) = (line for line in help_of("up").splitlines() if "--detach" in line)
    assert line.split()[:3] == ["--detach", "Return", "as"]


def test_overview_has_the_first_paragraph_of_each_command() -> None:
    assert "Keys of a scenario" not in help_of()
    assert "Keys of a scenario" in help_of("simulate")


def test_types_have_the_names_of_the_configuration() -> None:
    text = help_of("plan")
    assert "--rate X " in text and "--tp N " in text and "--kv-precision fp8|exact" in text
    assert "<" not in text.replace("<=", "")


def test_make_down_passes_options_on() -> None:
    command = ["make", "-n", "--assume-old=.venv/installed", "down", "ARGS=--cluster other"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    commands = done.stdout.splitlines()  # make adds lines of its own where another make runs it
    assert any(line.endswith("baton down --cluster other") for line in commands)
