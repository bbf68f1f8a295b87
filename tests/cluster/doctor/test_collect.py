"""What collectors find on this machine, and the commands as a stranger calls them."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from cluster.doctor import checks, gpus, leftovers, model, ports, redis
from cluster.doctor import checks as preflight
from cluster.doctor.finding import Check, Finding, ok, run_checks
from cluster.doctor.subject import DoctorSubject
from cluster.local import run_state as cluster_state
from cluster.local.redis_server import EmbeddedRedis
from cluster.models.locate import demo_path
from protocol.errors import StartupError
from tests.cluster.doctor.subjects import POOLS, SPEC, SUBJECT, levels


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "80", "HF_HUB_OFFLINE": "1"},
    )


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


# ---- the command -----------------------------------------------------------------------------


def test_the_demo_model_can_be_started_here() -> None:
    run = doctor("--port", free_port())
    assert run.returncode == 0, run.stdout + run.stderr
    assert "no problems" in run.stdout and "baton-demo" in run.stdout and "needed" in run.stdout
    assert max(len(line) for line in run.stdout.splitlines()) <= 80


def test_all_problems_are_reported_at_once(listener: int) -> None:
    redis_url = f"redis://:hunter2@127.0.0.1:{free_port()}/0"
    run = doctor(
        "--json", "--port", str(listener), "--model", "no/such/folder", "--redis-url", redis_url
    )
    answer = json.loads(run.stdout)
    assert run.returncode == 1 and answer["ok"] is False
    wrong = {f["check"]: f for f in answer["findings"] if f["level"] == "problem"}
    assert set(wrong) == {"port", "model", "redis"}
    assert f"pid {os.getpid()}" in wrong["port"]["text"]
    assert "refused" in wrong["redis"]["text"] and all(f["remedy"] for f in wrong.values())
    assert "hunter2" not in run.stdout + run.stderr


def test_too_little_memory_is_a_problem_with_values_that_fit() -> None:
    run = doctor("--port", free_port(), "--kv-tokens", "900000000")
    assert run.returncode == 1
    assert "--kv-tokens" in run.stdout and "(too little)" in run.stdout


def test_doctor_meets_its_deadline() -> None:
    run_checks(checks.all_checks(), SUBJECT)  # imports
    began = time.monotonic()
    examined = run_checks(checks.all_checks(), SUBJECT)
    assert time.monotonic() - began < 3.0
    assert set(examined.facts) == {check.name for check in checks.all_checks()}


# ---- running checks --------------------------------------------------------------------------


def test_a_check_that_hangs_or_fails_hides_no_other() -> None:
    never = threading.Event()

    def hang(_: DoctorSubject) -> int:
        never.wait()
        return 0

    def fail(_: DoctorSubject) -> int:
        raise ValueError("first line\nsecond")

    def nothing(_: DoctorSubject) -> int:
        return 0

    def fine(_facts: int, _wanted: DoctorSubject) -> list[Finding]:
        return [ok("c", "fine")]

    began = time.monotonic()
    examined = run_checks(
        [Check("a", hang, fine), Check("b", fail, fine), Check("c", nothing, fine)],
        SUBJECT,
        deadline_s=0.3,
    )
    assert time.monotonic() - began < 1.0
    never.set()
    assert levels(examined.findings) == ["problem", "problem", "ok"]
    assert "no answer within 0.3 s" in examined.findings[0].text
    assert examined.findings[1].text == "could not be checked: ValueError: first line"
    assert examined.facts == {"c": 0}


def test_preflight_reports_invalid_settings_with_other_problems(listener: int) -> None:
    def complain() -> None:
        raise StartupError("no such thing")

    wanted = DoctorSubject(model="/no/such", ports=(70000,), pools=POOLS)
    with pytest.raises(preflight.PreflightFailed) as failure:
        preflight.preflight(wanted, [complain])
    assert [f.check for f in failure.value.findings] == ["options", "port", "model"]
    assert str(failure.value).startswith("3 problems\n")
    notes, plans = preflight.preflight(
        msgspec.structs.replace(SUBJECT, ports=(listener,), port_moves=True)
    )
    assert "port" in [f.check for f in notes] and plans[0].fits


def test_preflight_refuses_a_start_without_enough_memory() -> None:
    large = msgspec.structs.replace(SPEC, kv_tokens=10**9)
    pools = tuple(msgspec.structs.replace(pool, engine=large) for pool in POOLS)
    with pytest.raises(preflight.PreflightFailed) as failure:
        preflight.preflight(DoctorSubject(pools=pools))
    assert [f.check for f in failure.value.findings] == ["memory"]
    assert "--kv-tokens" in failure.value.findings[0].remedy


def test_router_needs_a_tokenizer_and_no_weights(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(demo_path() / name, tmp_path)
    wanted = DoctorSubject(kind="router", model=str(tmp_path))
    [found] = model.judge(model.collect(wanted), wanted)[:1]
    assert found.level == "ok" and "parameters" not in found.text
    worker = msgspec.structs.replace(wanted, kind="worker", pools=POOLS)
    assert "*.safetensors" in model.judge(model.collect(worker), worker)[0].text


def test_gpus_that_ray_hides_from_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    facts = gpus.collect(msgspec.structs.replace(SUBJECT, gpus=2))
    assert facts.visible == 2 and facts.order is None
    assert gpus.collect(SUBJECT).visible == 0


def test_node_with_gpus_and_without_a_compiler_has_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `baton up --address` asks a node, with a folder on the path that has no program."""
    monkeypatch.setenv("PATH", os.environ["BATON_HOME"])
    monkeypatch.delenv("CC", raising=False)
    engine = msgspec.structs.replace(SPEC, device="cuda")
    pools = (msgspec.structs.replace(POOLS[1], engine=engine),)
    node = msgspec.structs.replace(SUBJECT, kind="worker", pools=pools, gpus=1)
    results = run_checks(checks.node_checks(node, memory=False), node)
    [found] = [f for f in results.findings if "C compiler" in f.text]
    assert found.level == "problem" and "gcc and libc6-dev" in found.remedy
    monkeypatch.setenv("CC", sys.executable)
    results = run_checks(checks.node_checks(node, memory=False), node)
    assert not [f for f in results.findings if "C compiler" in f.text]


# ---- collectors ------------------------------------------------------------------------------


def test_a_port_and_its_owner(listener: int) -> None:
    wanted = msgspec.structs.replace(SUBJECT, ports=(listener, 0))
    (port,) = ports.collect(wanted).ports
    assert port.owner is not None and f"pid {os.getpid()}" in port.owner
    assert port.next_free is not None and port.next_free > listener


def test_port_of_another_cluster_is_reported_with_its_name(listener: int) -> None:
    other = cluster_state.ClusterHome("other")
    url = f"http://127.0.0.1:{listener}"
    other.write(cluster_state.RunState(run_dir="/nowhere", url=url, model_id="m"))
    lock = other.lock()
    assert lock is not None
    try:
        wanted = msgspec.structs.replace(SUBJECT, ports=(listener,))
        (port,) = ports.collect(wanted).ports
        assert port.owner == "cluster 'other' of this user" and not port.ours
    finally:
        os.close(lock)


def test_host_of_another_machine_is_a_problem() -> None:
    facts = ports.collect(msgspec.structs.replace(SUBJECT, host="203.0.113.7"))
    assert "no address of this machine" in facts.problem


def test_redis_with_a_password_is_queried() -> None:
    folder = cluster_state.new_run_dir()
    server = EmbeddedRedis(folder)
    server.start()
    try:
        wanted = msgspec.structs.replace(SUBJECT, redis_url=server.url)
        facts = redis.collect(wanted)
        assert not facts.error and facts.version.startswith("6.2") and 0 < facts.seconds < 1
        assert facts.policy == "noeviction" and facts.bounded and not facts.replica
        with Redis.from_url(server.url) as client:
            client.config_set("requirepass", "right")
        assert "Authentication" in redis.collect(wanted).error
        url = server.url.replace("unix://", "unix://:right@")
        right = redis.collect(msgspec.structs.replace(SUBJECT, redis_url=url))
        assert not right.error and "right" not in right.where
    finally:
        server.stop()
        cluster_state.remove_run_dir(folder)


def test_silent_redis_times_out(listener: int) -> None:
    began = time.monotonic()
    url = f"redis://127.0.0.1:{listener}/0"
    assert redis.collect(msgspec.structs.replace(SUBJECT, redis_url=url)).error
    assert time.monotonic() - began < 2.5


def test_folders_of_finished_runs_are_found() -> None:
    folder = cluster_state.new_run_dir()
    try:
        assert str(folder) not in leftovers.collect(SUBJECT).folders  # nothing of ours in it
        (folder / "launch.json").touch()
        assert str(folder) in leftovers.collect(SUBJECT).folders
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"BATON_RUN_DIR": str(folder)},
        )
        try:
            assert child.stdout is not None
            child.stdout.readline()  # `/proc` shows no environment while the process is replaced
            assert str(folder) not in leftovers.collect(SUBJECT).folders
        finally:
            child.kill()
            child.communicate()
    finally:
        cluster_state.remove_run_dir(folder)
