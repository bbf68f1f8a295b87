"""`baton logs` and `baton ls`, while a cluster runs and after it has ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.local import kept_logs
from cluster.local.run_state import ClusterHome, RunState, new_run_dir
from cluster.local.start_report import (
    ClusterReady,
    StageDone,
    StageFailed,
    StageNote,
    StageStarted,
    StageWaiting,
    StartEventWriter,
)
from cluster.local.timed_log import with_time
from tests.system import HEED_INTERRUPTS

HEAD = ":job_id:01000000\n:actor_name:ServeReplica:baton-{}:Worker\n"
runner = CliRunner()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterHome:
    """A cluster whose supervisor this process plays, with logs as Ray names them."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    made, run_dir = ClusterHome("default"), new_run_dir()
    made.write(RunState(run_dir=str(run_dir), url="http://127.0.0.1:8000", model_id="m"))
    made.log.write_text("drained in 0.1 s\n")
    folder = run_dir / "ray" / "session_2026" / "logs"
    folder.mkdir(parents=True)
    ended = "engine of decode worker 1a2b3c4d: killed by signal 9\n"
    (folder / "worker-ab-01-77.err").write_text(HEAD.format("decode") + ended)
    (folder / "worker-ab-01-78.err").write_text(HEAD.format("router") + "a router's line\n")
    (folder / "worker-ab-01-79.err").write_text(HEAD.format("prefill"))
    (folder / "worker-ab-01-80.err").write_text("no replica\n")
    (run_dir / "decisions.jsonl").write_text('{"decision": 1}\n')
    return made


def output(*arguments: str, status: int = 0) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


def test_logs_are_found_while_the_cluster_runs_and_after_it(home: ClusterHome) -> None:
    lock = home.lock()
    assert lock is not None
    try:
        assert output("ls") == "default  http://127.0.0.1:8000  m  starting or stopping\n"
        _check_logs()
    finally:
        os.close(lock)
    home.clean()
    assert output("ls") == "no cluster of this user runs on this machine\n"
    _check_logs()
    assert home.kept_logs.stat().st_mode & 0o777 == 0o700


def _check_logs() -> None:
    assert output("logs", "decode").endswith("worker 1a2b3c4d: killed by signal 9\n")
    assert output("logs", "decode", "--lines", "1").count("\n") == 1
    assert output("logs", "1a2b3c4d") == output("logs", "77") == output("logs", "decode")
    assert "decision" in output("logs", "decisions")
    assert output("logs", "supervisor") == "drained in 0.1 s\n"
    everything = output("logs")
    assert "router-78: a router's line" in everything and "decode-77: engine of" in everything
    assert output("logs", "prefill") == "baton: nothing was written to prefill-79.log\n"
    words = (
        "there are prefill, decode, router, supervisor, decisions, a pid (77, 78, 79), or the id"
    )
    assert words in output("logs", "nothing", status=2)
    assert "'prefil'; did you mean prefill?" in output("logs", "prefil", status=2)
    assert "'decod'; did you mean decode?" in output("logs", "decod", status=2)


def test_progress_is_printed_as_text(home: ClusterHome) -> None:
    write = StartEventWriter(home.events)
    write(StageStarted("deploy"))
    write(StageNote("decode: loading weights"))
    write(StageNote("decode: loading weights 45%"))
    write(StageWaiting(("decode",), 170.0))
    write(StageDone("deploy", "1 prefill, 1 decode"))
    write(StageFailed("test", "no answer"))
    write(ClusterReady("http://127.0.0.1:8000", "m"))
    assert output("logs", "progress").splitlines() == [
        "deploy: started",
        "decode: loading weights",
        "deploy: done, 1 prefill, 1 decode",
        "test: failed: no answer",
        "ready: m at http://127.0.0.1:8000",
    ]
    home.clean()


def test_pid_of_an_engine_leads_to_the_log_of_its_worker(home: ClusterHome) -> None:
    lock = home.lock()
    assert lock is not None
    state = home.read()
    assert state is not None
    folder = Path(state.run_dir) / "ray" / "session_2026" / "logs"
    log = folder / f"worker-ab-01-{os.getpid()}.err"
    log.write_text(HEAD.format("decode") + "a worker's line\n")
    engine = subprocess.Popen(["sleep", "60"])
    try:
        assert output("logs", str(engine.pid)) == "a worker's line\n"
    finally:
        engine.kill()
        engine.wait()
        os.close(lock)
        home.clean()


def test_errors_name_the_clusters_that_run(home: ClusterHome) -> None:
    lock = home.lock()
    assert lock is not None
    try:
        for command in (["logs"], ["status", "--once"], ["scale", "prefill=2"]):
            assert "(running: default;" in output(*command, "--cluster", "other", status=1)
    finally:
        os.close(lock)
        home.clean()


def test_kept_logs_are_bounded(home: ClusterHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_logs, "MAX_FILES", 2)
    monkeypatch.setattr(kept_logs, "MAX_BYTES", 20)
    home.clean()
    kept = list(home.kept_logs.iterdir())
    assert len(kept) == 2 and all(path.stat().st_size <= 20 for path in kept)


def test_follow_prints_what_is_appended_and_what_starts_later(home: ClusterHome) -> None:
    lock = home.lock()
    assert lock is not None
    follow = [sys.executable, "-m", "cluster.cli.main", "logs", "decode", "--follow", "-n", "1"]
    following = subprocess.Popen(
        [*HEED_INTERRUPTS, *follow], stdout=subprocess.PIPE, text=True, pass_fds=(lock,)
    )
    try:
        assert following.stdout is not None
        state = home.read()
        assert state is not None
        (log,) = Path(state.run_dir).glob("ray/session_2*/logs/worker-ab-01-77.err")
        assert following.stdout.readline().endswith("1a2b3c4d: killed by signal 9\n")
        with log.open("a") as stream:
            stream.write("a new line\n")
        assert following.stdout.readline() == "a new line\n"
        log.with_name("worker-ab-01-90.err").write_text(HEAD.format("decode") + "a new worker\n")
        assert following.stdout.readline() == "decode-90: a new worker\n"
        following.send_signal(signal.SIGINT)
        assert following.wait(10) == 0
    finally:
        following.kill()
        following.wait()
        os.close(lock)
        home.clean()


def test_ids_and_pids_lead_to_the_own_log_of_the_worker(home: ClusterHome) -> None:
    state = home.read()
    assert state is not None
    folder = Path(state.run_dir) / "ray" / "session_2026" / "logs"
    own = "ready: prefill worker 5e6f70809abc, pid 81, engine pid 82\n"
    again = "ready: engine pid 83, in place of pid 82\n"
    (folder / "worker-ab-01-81.err").write_text(HEAD.format("prefill") + own + again)
    other = "worker 5e6f7080 does not answer; pid 82 neither, 83 items\n"
    (folder / "worker-ab-01-84.err").write_text(HEAD.format("router") + other)
    home.clean()
    for named in ("5e6f70", "5e6f70809abc", "82", "83"):
        assert output("logs", named) == own + again


def test_logs_that_cannot_be_are_explained(home: ClusterHome) -> None:
    state = home.read()
    assert state is not None
    (Path(state.run_dir) / "decisions.jsonl").unlink()
    home.clean()
    assert "the autoscaler is off" in output("logs", "decisions", status=1)
    said = output("logs", "--cluster", "never", status=1)
    assert "`baton ls` lists" in said and "baton up --cluster never` starts" in said


def test_death_of_a_replica_is_in_its_own_log(home: ClusterHome) -> None:
    state = home.read()
    assert state is not None
    kept_logs.append_to_log(Path(state.run_dir), 77, with_time("decode replica ended"))
    home.clean()
    assert re.search(r"\n\d{4}-\d\d-\d\d [\d:]+ decode replica ended\n$", output("logs", "77"))


def test_lines_of_replicas_have_a_time() -> None:
    program = (
        "import logging; from cluster.local.timed_log import log_with_times\n"
        "log_with_times(); log_with_times()\n"
        "logging.getLogger('baton.worker').info('ready: decode worker')\n"
        "logging.getLogger('other').info('not shown')\n"
        "logging.getLogger('ray.serve').warning('not shown twice')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:]+ ready: decode worker\n", done.stderr)
