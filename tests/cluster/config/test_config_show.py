"""`baton config`: what counts, where it is from, and that it can be used again."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from cluster.cli.main import app
from cluster.config import keys, show_config
from cluster.config.resolve import CommandFlags, resolve_config

SECRETS = ("hunter2", "t0ken-t0ken-t0ken", "abcdef0123456789" * 4)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in keys.CONFIG_KEYS:
        monkeypatch.delenv(key.variable, raising=False)
    monkeypatch.delenv("BATON_CONFIG", raising=False)


def config(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", *arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "baton.yaml"
    path.write_text(
        "model: {id: 'yes: # 1', path: \"two\\nlines\"}\n"
        "router: {host: '::1', ttft_slo_ms: 1500.5}\n"
        "pools: {decode: {workers: 2, kv_tokens: 640}}\nredis: {url: redis://localhost:6380/1}\n"
    )
    return path


def test_every_value_says_where_it_is_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PREFILL", "3")
    shown = config("--config", str(file), "--port", "9000", "--allow-plain-http")
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    for line in (
        "port: 9000 # flag --port",
        "workers: 3 # environment BATON_PREFILL",
        f"workers: 2 # {file}:3",
        "allow_plain_http: true # flag --allow-plain-http",
        "max_batch: null # default",
        f"url: redis://localhost:6380/1 # {file}:4",
        f"id: 'yes: # 1' # {file}:1",
    ):
        assert line in lines
    assert "\x1b" not in shown.output


def test_the_variable_baton_config_names_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CONFIG", str(file))
    assert "kv_tokens: 640" in config().output


def test_it_can_be_fed_back(file: Path, tmp_path: Path) -> None:
    first = config("--config", str(file), "--max-batch", "7", "--decode-threads", "3")
    again = tmp_path / "again.yaml"
    again.write_text(first.output)
    assert (
        resolve_config(CommandFlags(again), {}).config
        == resolve_config(
            CommandFlags(
                file,
                {
                    keys.KEYS_BY_PATH["worker", "max_batch"]: ("--max-batch", "7"),
                    keys.KEYS_BY_PATH["pools", "decode", "threads"]: ("--decode-threads", "3"),
                },
            ),
            {},
        ).config
    )
    second = config("--config", str(again))
    assert yaml.safe_load(second.output) == yaml.safe_load(first.output)


def test_secrets_are_hidden_and_refused_when_fed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password, token, secret = SECRETS
    path = tmp_path / "baton.yaml"
    path.write_text(
        f"redis: {{url: 'rediss://u:{password}@h:1/0'}}\nsecurity: {{token: {token}}}\n"
    )
    path.chmod(0o600)
    monkeypatch.setenv("BATON_SECRET", secret)
    shown = config("--config", str(path))
    assert shown.exit_code == 0
    assert not any(text in shown.output for text in SECRETS)
    assert shown.output.count(": <hidden>") == 3
    settled = resolve_config(CommandFlags(path), {"BATON_SECRET": secret})
    assert not any(text in repr(settled) for text in SECRETS)
    assert not any(text in settled.config.model_dump_json() for text in SECRETS)
    path.write_text(shown.output)
    refused = config("--config", str(path))
    assert refused.exit_code == 2
    assert refused.output.count("`baton config` does not show it") == 3


def test_colors_on_a_terminal() -> None:
    values = resolve_config(CommandFlags(), {}).values
    assert show_config.render_config(values, color=True).spans
    assert (
        show_config.render_config(values, color=True).plain
        == show_config.render_config(values, color=False).plain
    )


def test_mistakes_end_with_status_2_and_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("router: {prt: 1}\n")
    for command in (["config"], ["up"], ["scale", "x"], ["worker", "--role", "decode"], ["router"]):
        result = CliRunner().invoke(app, [*command, "--config", str(path)])
        assert result.exit_code == 2
        assert f"{path}:1: router.prt: unknown key; did you mean router.port?" in result.output
        assert "Traceback" not in result.output


def test_the_schema_is_json() -> None:
    schema = json.loads(config("--schema").output)
    assert schema["properties"]["router"] and schema["additionalProperties"] is False


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith("baton 0.")


def test_a_wrong_flag_is_suggested() -> None:
    result = CliRunner().invoke(app, ["up", "--prot", "1"])
    assert result.exit_code == 2 and "--port" in result.output
