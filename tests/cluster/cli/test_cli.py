import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.common import parse_router_url
from cluster.cli.main import app
from cluster.serve.ray_runtime import gpu_count

runner = CliRunner()
PLAN = ["plan", "--model", "Llama-3-8B", "--rate", "4", "--prompt", "100", "--output", "10"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    for name in ("BATON_TOKEN", "BATON_SECRET", "BATON_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from cluster.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('ray', 'torch', 'redis', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    "name",
    [
        *("cluster.launch.standalone", "router.http.app", "cluster.launch.up"),
        *("cluster.launch.down", "cluster.launch.supervisor", "cluster.serve.scale"),
    ],
)
def test_fronts_need_neither_ray_nor_torch(name: str) -> None:
    program = f"import sys, {name}; print([m for m in ('ray', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_down_when_nothing_runs() -> None:
    result = runner.invoke(app, ["down"])
    assert result.exit_code == 0
    assert "was not running" in result.output


@pytest.mark.parametrize(
    ("arguments", "named", "status"),
    [
        (["up", "--host", "0.0.0.0"], "0.0.0.0", 2),
        (["up", "--model", "/no/such/folder"], "/no/such/folder", 2),
        (["worker", "--role", "decode", "--model", "/no/such/folder"], "BATON_TOKEN", 2),
        (["status", "--url", "foo"], "--url must be http://HOST:PORT", 2),
        (["status", "--url", "127.0.0.1:8123"], "missing; give http://127.0.0.1:8123", 2),
        (["status", "--url", "http://h:1/v1"], "without a path: http://h:1", 2),
        (["status", "--url", "http://h:1", "--ca-file", "/nonexistent"], "/nonexistent", 2),
        (["monitoring", "x", "--url", "h:1"], "give http://h:1", 2),
        (["monitoring", "x", "--url", "http://h:1", "--ca-file", "/none"], "no file /none", 2),
        (
            ["init", "x", "--host", "h", "--redis-url", "http://x"],
            "the Redis URL cannot be used",
            2,
        ),
        (["init", "x", "--host", "h", "--redis-url", "redis://h2"], "--redis-url", 2),
        (["up", "--port", "70000"], "65535", 2),
        (["up", "--cluster", "../x"], "cluster name", 2),
        (["up", "--device", "cuda:0"], "worker.device: expected cpu or cuda", 2),
        (["simulate", __file__], "not YAML", 2),
        (["simulate", "/no/such/file"], "cannot be read", 2),
        (["simulate", "--replay", "/no/such/file"], "cannot be read", 2),
        (["simulate", "--set", "pools.decode=0"], "pools.decode", 2),
        (["worker", "--role", "decode", "--redis-url", "unix:///x"], "BATON_TOKEN", 2),
        (["router", "--redis-url", "unix:///x"], "BATON_TOKEN", 2),
        (["router"], "BATON_REDIS_URL", 2),
        (["worker", "--role", "drafting"], "BATON_TOKEN", 2),
        (["scale", "workers=3"], "prefill=N", 2),
        (["scale", "prefill=2"], "no cluster 'default'", 1),
        (["status", "--tls-ca", __file__], "security.tls.cert", 2),
        (["certs", "init", "x", "--host", "a b"], "--host", 2),
        (["simulate", "--set", "pools"], "KEY=VALUE", 2),
        ([*PLAN, "--gpu", "L4"], "is it L40S?", 2),
        ([*PLAN, "--gpu", "H20"], "is it H200", 2),
        ([*PLAN, "--gpu", "H100", "--prompt", "many"], "--prompt", 2),
        (["monitoring", "x", "--url", "nowhere"], "--url", 2),
    ],
)
def test_refusals_say_why(arguments: list[str], named: str, status: int, tmp_path: Path) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == status
    assert named in result.output
    assert not list(tmp_path.glob("*/state.json"))


def test_port_that_is_given_and_taken_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = runner.invoke(app, ["up", "--detach", "--port", port])
    assert result.exit_code == 1
    assert f"port: {port} is taken by pid {os.getpid()}" in result.output
    assert not list(tmp_path.glob("*/state.json"))


@pytest.mark.skipif(gpu_count() > 0, reason="a GPU is here")
@pytest.mark.parametrize("command", ["doctor", "up"])
def test_device_cuda_without_a_gpu_is_refused_before_ray_starts(
    command: str, tmp_path: Path
) -> None:
    result = runner.invoke(app, [command, "--device", "cuda"])
    assert result.exit_code == 1
    assert "worker.device is cuda, but no GPU is visible" in " ".join(result.output.split())
    assert not list(tmp_path.glob("*/state.json"))


def test_url_of_the_page_is_that_of_its_router() -> None:
    assert parse_router_url("http://127.0.0.1:8123/ui") == "http://127.0.0.1:8123"
    assert parse_router_url("https://[::1]:8123/") == "https://[::1]:8123"


@pytest.mark.parametrize(
    "command", [["status", "--once"], ["logs"], ["down"], ["scale", "decode=2"]]
)
def test_commands_about_a_cluster_that_never_ran_create_nothing(
    command: list[str], tmp_path: Path
) -> None:
    runner.invoke(app, [*command, "--cluster", "nope"])
    assert not list(tmp_path.iterdir())


def test_down_stops_in_spite_of_mistakes_that_do_not_concern_it(tmp_path: Path) -> None:
    (file := tmp_path / "bad.yaml").write_text(
        "cluster: mine\nworker: {max_batch: many, no_such: 1}\nother: 1\n"
    )
    result = runner.invoke(app, ["down", "--config", str(file)])
    assert result.exit_code == 0
    assert "cluster 'mine' was not running" in result.output
    assert "warning" in result.output and "worker.max_batch" in result.output


@pytest.mark.parametrize("text", ["clutser: mine\n", "cluster: [mine]\n", "cluster: {\n"])
def test_down_refuses_mistakes_that_may_be_about_the_cluster(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "bad.yaml").write_text(text)
    assert runner.invoke(app, ["down", "--config", str(file)]).exit_code == 2


def test_a_missing_key_is_named_without_a_place() -> None:
    said = runner.invoke(app, ["router"]).output
    assert "  redis.url: missing; set --redis-url" in said and "default" not in said
