"""Variables that are nearly a key's."""

import os
import subprocess
import sys

import pytest

from cluster.cli.common import misspelt_variables
from cluster.config.keys import CONFIG_KEYS


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("BATON_KV_TOKNES", "BATON_KV_TOKENS"),
        ("BATON_PROT", "BATON_PORT"),
        ("BATON_TOKENS", "BATON_TOKEN"),
        ("BATON_port", "BATON_PORT"),
        ("BATON_APIKEYS", "BATON_API_KEYS"),
        ("BATON_HOMES", "BATON_HOME"),
        ("BATON_DECODE_THREAD", "BATON_DECODE_THREADS"),
    ],
)
def test_warning_names_the_variable_that_was_meant(given: str, meant: str) -> None:
    [line] = misspelt_variables({given: "s3cret", "PATH": "/bin"})
    assert line == f"{given} is unknown and has no effect; did you mean {meant}?"


def test_correct_and_foreign_variables_give_no_warning() -> None:
    ours = [key.variable for key in CONFIG_KEYS]
    others = ["BATON_API_KEY", "BATON_CONFIG", "BATON_HOME", "BATON_RUN_DIR", "BATON_LOCK_FD"]
    assert misspelt_variables(dict.fromkeys([*ours, *others], "x")) == []
    assert misspelt_variables({"BATON_GREETING": "x", "BATTON_PORT": "1", "KV_TOKENS": "1"}) == []


def test_variables_of_kubernetes_give_no_warning() -> None:
    endpoint = "tcp://10.0.0.1:8000"
    for service in ("BATON", "BATON_WORKER", "BATON_HOST", "BATON_ROUTER_METRICS"):
        variables = {
            f"{service}_SERVICE_HOST": "10.0.0.1",
            f"{service}_SERVICE_PORT": "8000",
            f"{service}_SERVICE_PORT_HTTP": "8000",
            f"{service}_PORT": endpoint,
            f"{service}_PORT_8000_TCP": endpoint,
            f"{service}_PORT_8000_TCP_PROTO": "tcp",
            f"{service}_PORT_8000_TCP_PORT": "8000",
            f"{service}_PORT_8000_TCP_ADDR": "10.0.0.1",
        }
        assert misspelt_variables(variables) == []


def test_command_prints_the_warning_beside_its_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", "config"],
        env={**os.environ, "BATON_KV_TOKNES": "hush", "BATON_SERVICE_HOST": "10.0.0.1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    expected = (
        "baton: warning: BATON_KV_TOKNES is unknown and has no effect;"
        " did you mean BATON_KV_TOKENS?\n"
    )
    assert done.stderr == expected and "hush" not in done.stdout
