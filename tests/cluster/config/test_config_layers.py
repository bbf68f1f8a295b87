"""Which place wins, and where a value says that it is from."""

from pathlib import Path

import pytest

from cluster.config import assemble, keys
from cluster.config.mistakes import ConfigError
from cluster.config.resolve import CommandFlags, ResolvedConfig, resolve_config

FILE = "router:\n  port: 8001\n  host: ::1\nworker: {max_batch: 32}\nmodel: {id: in-file}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "baton.yaml"
    path.write_text(FILE)
    return path


def flags(file: Path | None = None, **texts: str) -> CommandFlags:
    by_flag = {key.flag: key for key in keys.CONFIG_KEYS}
    named = {f"--{name.replace('_', '-')}": text for name, text in texts.items()}
    return CommandFlags(file, {by_flag[flag]: (flag, text) for flag, text in named.items()})


def origin(settled: ResolvedConfig, name: str) -> str:
    return str(settled.values[keys.KEYS_BY_PATH[tuple(name.split("."))]].origin)


def test_flag_over_environment_over_file_over_default(file: Path) -> None:
    environ = {"BATON_PORT": "8002", "BATON_MODEL_ID": "in-environment", "BATON_DECODE": "3"}
    settled = resolve_config(flags(file, port="8003"), environ)
    config = settled.config
    assert (config.router.port, config.model.id, config.router.host) == (
        *(8003, "in-environment", "::1"),
    )
    assert (config.pools.decode.workers, config.worker.max_batch) == (3, 32)
    assert config.worker.prefill_chunk is None
    assert origin(settled, "router.port") == "flag --port"
    assert origin(settled, "model.id") == "environment BATON_MODEL_ID"
    assert origin(settled, "router.host") == f"{file}:3"
    assert origin(settled, "worker.max_batch") == f"{file}:4"
    assert origin(settled, "worker.prefill_chunk") == "default"


def test_a_flag_can_take_back_what_a_file_sets(file: Path) -> None:
    assert resolve_config(flags(file, model_id="null"), {}).config.model.id is None
    with pytest.raises(ConfigError, match=r"--port: router\.port: got 'null'; expected an"):
        resolve_config(flags(file, port="null"), {})


def test_variables_that_are_empty_do_not_count() -> None:
    assert resolve_config(CommandFlags(), {"BATON_PORT": ""}).config.router.port == 8000


def test_text_becomes_what_the_key_wants() -> None:
    environ = {"BATON_ALLOW_PLAIN_HTTP": "true", "BATON_MODEL_ID": "17", "BATON_DRAIN_S": "2"}
    config = resolve_config(CommandFlags(), environ).config
    assert config.security.allow_plain_http is True
    assert (config.model.id, config.drain_s) == ("17", 2.0)


def test_a_pool_says_otherwise_than_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("worker: {max_batch: 8, threads: 2}\npools: {decode: {max_batch: 16}}\n")
    settled = resolve_config(CommandFlags(path), {})
    prefill, decode = (assemble.worker_settings(settled.config, r) for r in ("prefill", "decode"))
    assert (prefill.engine.max_batch, decode.engine.max_batch) == (8, 16)
    assert (prefill.engine.threads, decode.engine.threads) == (2, 2)


def test_what_is_said_later_of_all_workers_wins_over_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("pools: {decode: {max_batch: 16, threads: 4}}\n")
    settled = resolve_config(flags(path, max_batch="4"), {"BATON_DECODE_THREADS": "3"})
    decode = assemble.worker_settings(settled.config, "decode")
    assert (decode.engine.max_batch, decode.engine.threads) == (4, 3)
    assert origin(settled, "pools.decode.max_batch") == "flag --max-batch"


def test_names_of_files_count_from_the_file_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "etc", tmp_path / "elsewhere"
    for made in (folder, elsewhere, folder / "models" / "m"):
        made.mkdir(parents=True)
    (folder / "keys.yaml").write_text("")
    (elsewhere / "ca.pem").write_text("")
    path = folder / "baton.yaml"
    path.write_text("security: {api_keys: keys.yaml}\nmodel: {path: models/m}\n")
    monkeypatch.chdir(elsewhere)
    environ = {f"BATON_TLS_{name}": "ca.pem" for name in ("CA", "CERT", "KEY")}
    config = resolve_config(CommandFlags(path), environ).config
    assert config.security.api_keys == str(folder / "keys.yaml")
    assert config.security.tls.ca == str(elsewhere / "ca.pem")
    assert config.model.path == str(folder / "models" / "m")
    path.write_text("model: {path: owner/name}\n")
    assert resolve_config(CommandFlags(path), {}).config.model.path == "owner/name"


def test_what_does_not_concern_a_command_does_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("router: {host: 0.0.0.0}\nsecurity: {api_keys: elsewhere.yaml}\n")
    resolve_config(CommandFlags(path), {}, keys.WORKER_KEYS)
    with pytest.raises(ConfigError) as raised:
        resolve_config(CommandFlags(path), {}, keys.ROUTER_KEYS)
    assert {m.key for m in raised.value.mistakes} == {"router.host", "security.api_keys"}


def test_what_a_command_needs() -> None:
    with pytest.raises(ConfigError, match=r"security\.token: missing; set BATON_TOKEN") as raised:
        resolve_config(CommandFlags(), {}, keys.WORKER_KEYS, ("redis.url", "security.token"))
    assert "redis.url: missing; set --redis-url or BATON_REDIS_URL" in str(raised.value)
