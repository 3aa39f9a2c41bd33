"""Heads on disk: strict reading, whole writing, and no pickle ever read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.vllm_bpd.samples import HIDDEN, heads_config, one_line, random_heads
from vllm_bpd import checkpoint
from vllm_bpd.checkpoint import (
    DRAFT_TOKEN_IDS,
    HIDDEN_WEIGHT,
    OUTPUT_WEIGHT,
    WEIGHTS_FILE,
    check_weights,
    expected_tensors,
    load_heads,
    load_tensors,
    read_config,
    save_heads,
)
from vllm_bpd.errors import HeadsError

pytestmark = pytest.mark.row("checkpoints")

IDS = torch.tensor([1, 5, 47])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a draft vocabulary."""
    save_heads(tmp_path / "heads", random_heads(heads_config(draft_vocab_size=3)), IDS)
    return tmp_path / "heads"


def rewrite(folder: Path, **changed: Tensor | None) -> None:
    """Replace tensors of the checkpoint; None removes one. Dots are double underscores."""
    tensors = load_file(folder / WEIGHTS_FILE)
    for key, tensor in changed.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS_FILE)


def refusal(folder: Path) -> str:
    with pytest.raises(HeadsError) as caught:
        load_heads(folder)
    return one_line(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_saving_and_loading_is_bit_exact_in_bf16(folder: Path, tmp_path: Path) -> None:
    heads = random_heads(heads_config(draft_vocab_size=3))
    loaded, ids_V = load_heads(folder, torch.bfloat16)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16)), name
    assert ids_V is not None
    assert ids_V.dtype == torch.int64
    assert torch.equal(ids_V, IDS)
    save_heads(tmp_path / "again", loaded, ids_V)
    assert contents(tmp_path / "again") == contents(folder)


def test_loading_gives_float32_unless_told(folder: Path) -> None:
    assert load_heads(folder)[0].hidden_layer.weight.dtype == torch.float32


def test_without_a_draft_vocabulary_there_are_no_ids(tmp_path: Path) -> None:
    save_heads(tmp_path / "heads", random_heads(heads_config()), dtype=torch.float32)
    assert load_heads(tmp_path / "heads")[1] is None
    assert sorted(load_tensors(tmp_path / "heads", heads_config())) == [
        HIDDEN_WEIGHT,
        OUTPUT_WEIGHT,
    ]


def test_expected_tensors_have_the_documented_shapes() -> None:
    assert expected_tensors(heads_config(draft_vocab_size=3)) == {
        "hidden_layer.weight": (3 * 8, 2 * HIDDEN),
        "output_layer.weight": (3 * HIDDEN, 3 * 8),
        "draft_token_ids": (3,),
    }


@pytest.mark.parametrize("name", [HIDDEN_WEIGHT, OUTPUT_WEIGHT, DRAFT_TOKEN_IDS])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    rewrite(folder, **{name.replace(".", "__"): None})
    assert f"{WEIGHTS_FILE}: {name}: missing; expected shape (" in refusal(folder)


def test_an_unused_tensor_is_named(folder: Path) -> None:
    rewrite(folder, hidden_layer__bias=torch.zeros(24))
    message = refusal(folder)
    assert f"{WEIGHTS_FILE}: hidden_layer.bias: unused; expected only {HIDDEN_WEIGHT}" in message


def test_ids_without_a_draft_vocabulary_are_unused(tmp_path: Path) -> None:
    save_heads(tmp_path, random_heads(heads_config()))
    rewrite(tmp_path, draft_token_ids=IDS.int())
    assert "draft_token_ids: unused" in refusal(tmp_path)


@pytest.mark.parametrize("shape", [(24, 16), (23, 32), (24 * 32,), (32, 24)])
def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path, shape: Any) -> None:
    rewrite(folder, hidden_layer__weight=torch.zeros(shape))
    assert f"{HIDDEN_WEIGHT}: found shape {shape}; config.json says (24, 32)" in refusal(folder)


@pytest.mark.parametrize(
    ("key", "dtype", "found"),
    [
        ("hidden_layer__weight", torch.float64, "F64; expected BF16 or F16 or F32"),
        ("output_layer__weight", torch.int8, "I8; expected BF16 or F16 or F32"),
        ("draft_token_ids", torch.int64, "I64; expected I32"),
        ("draft_token_ids", torch.float32, "F32; expected I32"),
    ],
)
def test_a_wrong_dtype_is_named(folder: Path, key: str, dtype: torch.dtype, found: str) -> None:
    old = load_file(folder / WEIGHTS_FILE)[key.replace("__", ".")]
    rewrite(folder, **{key: old.to(dtype)})
    assert f"{key.replace('__', '.')}: found dtype {found}" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_float_dtype_of_training_is_read(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, hidden_layer__weight=torch.zeros(24, 32, dtype=dtype))
    assert load_heads(folder)[0].hidden_layer.weight.dtype == torch.float32


@pytest.mark.parametrize("ids", [[5, 1, 47], [1, 1, 47], [-1, 5, 47], [1, 5, 48]])
def test_draft_ids_ascend_inside_the_vocabulary(folder: Path, ids: list[int]) -> None:
    rewrite(folder, draft_token_ids=torch.tensor(ids, dtype=torch.int32))
    message = refusal(folder)
    assert f"model.safetensors: draft_token_ids: found ids {min(ids)}..{max(ids)}, " in message
    assert message.endswith("expected strictly ascending ids in 0..47")
    with pytest.raises(HeadsError, match="draft_token_ids: found ids"):
        save_heads(folder, random_heads(heads_config(draft_vocab_size=3)), torch.tensor(ids))


@pytest.mark.parametrize("keep", [0, 4, 50, -1])
def test_a_truncated_file_is_refused(folder: Path, keep: int) -> None:
    weights = folder / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:keep])
    assert f"{weights}: not a readable safetensors file (" in refusal(folder)


def test_a_header_that_claims_ten_gigabytes_is_refused(folder: Path) -> None:
    rows = 10 * 2**30 // (2 * 32)
    header = json.dumps(
        {HIDDEN_WEIGHT: {"dtype": "BF16", "shape": [rows, 32], "data_offsets": [0, rows * 64]}}
    ).encode()
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    assert "not a readable safetensors file (" in refusal(folder)


def test_a_header_that_is_ten_gigabytes_is_refused(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 10 * 2**30) + b"{}")
    assert "not a readable safetensors file (" in refusal(folder)


def test_checking_reads_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Any = safe_open

    def read(file: Any, name: str) -> Tensor:
        if name != DRAFT_TOKEN_IDS:
            raise AssertionError("a tensor was read")
        ids: Tensor = file.get_tensor(name)
        return ids

    class HeaderOnly:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def __enter__(self) -> HeaderOnly:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> Any:
            return self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return partial(read, self.file) if name == "get_tensor" else getattr(self.file, name)

    monkeypatch.setattr(checkpoint, "safe_open", HeaderOnly)
    check_weights(folder, read_config(folder))
    with pytest.raises(AssertionError, match="a tensor was read"):
        load_tensors(folder, read_config(folder))


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl"])
def test_a_pickle_is_never_read(folder: Path, tmp_path: Path, suffix: str) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    alone = tmp_path / f"heads{suffix}"
    alone.write_bytes(bomb)
    assert refusal(alone).startswith(f"{alone}: a pickled checkpoint; expected a folder")

    (folder / f"pytorch_model{suffix}").write_bytes(bomb)
    assert load_heads(folder)  # safetensors beside it
    (folder / WEIGHTS_FILE).unlink()
    message = refusal(folder)
    assert f"pytorch_model{suffix}: a pickled checkpoint, which runs code when read" in message
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists()  # so it would have been seen


def test_a_pickle_named_like_safetensors_is_never_read(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert "not a readable safetensors file (" in refusal(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_folder_may_be_named_like_a_pickle(folder: Path) -> None:
    moved = folder.rename(folder.with_name("v1.pt"))
    assert read_config(moved).num_draft_heads == 3


@pytest.mark.parametrize("text", ["{", "", "nonsense", "\xff"])
def test_a_config_that_is_no_json_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert refusal(folder).startswith(f"{folder / 'config.json'}: not readable as JSON (")


@pytest.mark.parametrize(("text", "found"), [("[]", "list"), ("3", "int"), ("null", "NoneType")])
def test_a_config_that_is_no_object_is_refused(folder: Path, text: str, found: str) -> None:
    (folder / "config.json").write_text(text)
    assert refusal(folder) == f"{folder / 'config.json'}: found {found}; expected a JSON object"


def test_a_bad_field_is_named_with_its_file(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text()) | {"head_hidden_size": 0}
    (folder / "config.json").write_text(json.dumps(values))
    assert refusal(folder).startswith(f"{folder / 'config.json'}: head_hidden_size: found 0")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS_FILE])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert refusal(folder).startswith(f"{folder / name}: not found")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "gone/config.json: not found; expected a folder with" in refusal(tmp_path / "gone")


def test_ids_are_given_exactly_when_the_config_has_a_draft_vocabulary(tmp_path: Path) -> None:
    for config, ids in (
        (heads_config(), IDS),
        (heads_config(draft_vocab_size=3), None),
        (heads_config(draft_vocab_size=4), IDS),
    ):
        with pytest.raises(HeadsError, match="draft_token_ids: ") as caught:
            save_heads(tmp_path / "heads", random_heads(config), ids)
        one_line(caught.value)
    assert not any(tmp_path.iterdir())


def test_extra_files_are_written_beside_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "heads"
    save_heads(folder, random_heads(heads_config()), extra_files={"README.md": "naïve\n"})
    assert sorted(contents(folder)) == ["README.md", "config.json", WEIGHTS_FILE]
    assert (folder / "README.md").read_text(encoding="utf-8") == "naïve\n"


@pytest.mark.parametrize(
    ("umask", "file", "directory"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)]
)
def test_files_are_as_readable_as_any_the_user_writes(
    tmp_path: Path, umask: int, file: int, directory: int
) -> None:
    folder = tmp_path / "heads"
    before = os.umask(umask)
    try:
        save_heads(folder, random_heads(heads_config()), extra_files={"README.md": ""})
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == directory
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {file}


class Interrupted(BaseException):
    """Stands for an interrupt, which no `except Exception` sees."""


@pytest.mark.parametrize(
    "step", ["save_file", "_write_json", "check_weights", "_swap_in", "rename", "first replace"]
)
def test_an_older_checkpoint_survives_a_failure_at_any_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = contents(folder)

    def fail(*_: Any, **__: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        if step == "rename":  # the old one is out of the way, the new one not yet in
            patch.setattr(Path, "rename", fail)
        elif step == "first replace":
            patch.setattr(os, "replace", fail)
        else:
            patch.setattr(checkpoint, step, fail)
        with pytest.raises(Interrupted):
            save_heads(folder, random_heads(heads_config(), seed=1))
    assert contents(folder) == before
    leftovers = [p.name for p in folder.parent.iterdir() if p != folder and any(p.iterdir())]
    assert leftovers == []


def test_a_failed_first_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(
        HeadsError, match=r"cannot be written \(disk full\); what was there is as it"
    ):
        save_heads(tmp_path / "heads", random_heads(heads_config()))
    assert not any(tmp_path.iterdir())


def test_older_heads_are_replaced_whole(folder: Path) -> None:
    (folder / "notes.txt").write_text("of the old ones")
    save_heads(folder, random_heads(heads_config(), seed=1))
    assert sorted(contents(folder)) == ["config.json", WEIGHTS_FILE]
    assert read_config(folder).draft_vocab_size is None
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


def test_a_link_stays_one(folder: Path) -> None:
    link = folder.parent / "latest"
    link.symlink_to("heads")
    save_heads(link, random_heads(heads_config(), seed=1))
    assert link.is_symlink()
    assert read_config(folder).draft_vocab_size is None


def test_the_current_folder_can_be_named_by_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save_heads(".", random_heads(heads_config()))
    assert read_config(tmp_path / "here") == heads_config()


@pytest.mark.parametrize("kind", ["file", "folder", "target", "broken"])
def test_what_is_no_heads_is_never_replaced(folder: Path, kind: str) -> None:
    if kind == "file":
        shutil.rmtree(folder)
        folder.write_text("a thesis")
    elif kind == "folder":
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text('{"model_type": "llama"}' if kind == "target" else "{")
    with pytest.raises(HeadsError) as caught:
        save_heads(folder, random_heads(heads_config()))
    assert one_line(caught.value).startswith(f"{folder}: found something other than heads")
    assert folder.exists()
    assert [path.name for path in folder.parent.iterdir()] == ["heads"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    save_heads(tmp_path / "heads", random_heads(heads_config()))
    assert read_config(tmp_path / "heads") == heads_config()
