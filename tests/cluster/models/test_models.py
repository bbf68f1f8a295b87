import shutil
from pathlib import Path

import pytest

from cluster.models import hub, locate
from protocol.errors import StartupError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-llama"
    path.mkdir()
    shutil.copy(locate.demo_path() / "config.json", path)
    (path / "tokenizer.json").write_text("{}")
    (path / "model-00001-of-00002.safetensors").touch()
    return path


def test_folder_gives_its_name(folder: Path) -> None:
    assert locate.resolve_model(str(folder)) == locate.ServedModel(folder, "tiny-llama")
    assert locate.resolve_model(str(folder), "mine").id == "mine"


def test_demo_is_the_default() -> None:
    assert locate.demo_path().parts[-3:] == ("engine", "demo", "target")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"]
)
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(StartupError, match=name.replace("model-00001-of-00002", r"\*")):
        locate.resolve_model(str(folder))


def test_all_missing_files_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config.json, tokenizer.json, \*.safetensors"):
        locate.check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ('{"architectures": ["GPT2LMHeadModel"]}', "GPT2LMHeadModel"),
        ("{}", "architecture none is not supported"),
        ("[", "not a usable model config"),
        ("null", "not a usable model config"),
        ('{"architectures": 3}', "not a usable model config"),
        ('{"architectures": ["LlamaForCausalLM"]}', "num_attention_heads"),
    ],
)
def test_what_is_not_supported_is_refused(folder: Path, config: str, named: str) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(StartupError, match=named):
        locate.resolve_model(str(folder))


@pytest.mark.parametrize("wanted", ["nowhere", "/no/such/folder", "/nope", "./a/b", ""])
def test_neither_folder_nor_hub_id(wanted: str) -> None:
    with pytest.raises(StartupError, match=r"but neither exists$"):  # nothing has a similar name
        locate.resolve_model(wanted)


def test_what_may_have_been_meant_is_named(folder: Path) -> None:
    with pytest.raises(StartupError, match=rf"similar names: {folder}"):
        locate.resolve_model(str(folder.parent / "tiny-lama"))
    with pytest.raises(StartupError, match=rf"give its folder: {folder}$"):
        locate.resolve_model(str(folder / "config.json"))
    (folder.parent / "nothing").mkdir()
    with pytest.raises(StartupError, match=rf"give {folder} instead"):
        locate.resolve_model(str(folder.parent))


def test_a_hub_id_may_name_a_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate.locate_model("owner/none@v1.0").repo == hub.HubRepo("owner/none", "v1.0")
    assert locate.locate_model("owner/none@").repo == hub.HubRepo("owner/none")
    with pytest.raises(StartupError, match="no valid hub id"):
        locate.locate_model("owner/na me")


def test_a_folder_with_a_like_name_comes_before_the_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.chdir(folder.parent.parent)
    with pytest.raises(StartupError, match="similar names"):
        locate.locate_model(f"{folder.parent.name}/tiny-lama")
