"""Where heads are looked for, in which order, and what is said when none fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_bpd.samples import one_line, write_heads, write_target
from vllm_bpd import discovery
from vllm_bpd.checkpoint import WEIGHTS_FILE, check_weights, read_config
from vllm_bpd.discovery import HEADS_FOLDER, find_heads, resolve_target, shipped_names
from vllm_bpd.errors import HeadsError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the heads inside the package."""
    monkeypatch.setattr(discovery, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "shipped"


def refusal(target: Path | str, heads: Path | str | None = None) -> str:
    with pytest.raises(HeadsError) as caught:
        find_heads(str(target), None if heads is None else str(heads))
    return one_line(caught.value)


def test_named_before_inside_before_shipped(target: Path, tmp_path: Path, shipped: Path) -> None:
    write_heads(shipped / "tiny", target, num_draft_heads=1)
    found = find_heads(str(target))
    assert (found.config.num_draft_heads, found.source) == (1, "shipped with vllm-bpd as tiny")
    assert found.folder == shipped / "tiny"

    write_heads(target / HEADS_FOLDER, target, num_draft_heads=2)
    found = find_heads(str(target))
    assert (found.config.num_draft_heads, found.source) == (2, "bpd_heads/ of the target")
    assert found.folder == target / HEADS_FOLDER

    named = write_heads(tmp_path / "named", target, num_draft_heads=4)
    found = find_heads(str(target), str(named))
    assert (found.config.num_draft_heads, found.source) == (4, f"folder {named}")


def test_without_heads_it_says_where_it_looked_and_how_to_train(
    target: Path, tmp_path: Path, shipped: Path
) -> None:
    assert refusal(target) == (
        f"model: no heads found for {target}; looked in bpd_heads/ of the target and among the "
        "heads shipped with vllm-bpd (none); train some with "
        f"`bpd-train all --target {target} --output DIR` and give "
        '{"method": "bpd", "model": "DIR"}'
    )
    other = write_target(tmp_path / "other", num_hidden_layers=3)
    write_heads(shipped / "a", other)
    write_heads(shipped / "b", other)
    assert "shipped with vllm-bpd (a, b); train" in refusal(target)


def test_shipped_heads_need_a_known_lm_head(target: Path, shipped: Path) -> None:
    """Two unknown hashes are equal and say nothing: heads are not shipped on a guess."""
    (target / WEIGHTS_FILE).unlink()
    write_heads(shipped / "tiny", target)
    assert "no heads found" in refusal(target)


def test_heads_inside_that_are_damaged_are_not_passed_over(target: Path, shipped: Path) -> None:
    write_heads(shipped / "tiny", target)
    (write_heads(target / HEADS_FOLDER, target) / WEIGHTS_FILE).unlink()
    assert f"{WEIGHTS_FILE}: not found" in refusal(target)
    (target / HEADS_FOLDER / "config.json").unlink()
    assert "config.json: not found" in refusal(target)


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [("hidden_size", 16, 32), ("vocab_size", 48, 64), ("num_hidden_layers", 2, 3)],
)
def test_heads_of_another_target_are_refused_with_both_sizes(
    target: Path, tmp_path: Path, field: str, ours: int, theirs: int
) -> None:
    heads = write_heads(tmp_path / "heads", target)
    changed: dict[str, Any] = {field: theirs}
    other = write_target(tmp_path / "other", {}, **changed)
    assert refusal(other, heads) == (
        f"{heads}: these heads belong to another target; {field}: the heads were trained for "
        f"{ours}, this target has {theirs}; train heads for this one with `bpd-train all`"
    )


def test_heads_of_a_finetuned_target_are_refused(target: Path, tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "heads", target)
    (target / WEIGHTS_FILE).unlink()
    assert find_heads(str(target), str(heads)).config.num_draft_heads == 3  # nothing to compare
    other = write_target(tmp_path / "other")
    values = json.loads((heads / "config.json").read_text())
    values["target"]["lm_head_hash"] = "f" * 64
    (heads / "config.json").write_text(json.dumps(values))
    assert "lm_head_hash: the heads were trained for ffffffffffff" in refusal(other, heads)


def test_inside_heads_of_another_target_are_refused(target: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", {}, num_hidden_layers=3)
    write_heads(target / HEADS_FOLDER, other)
    assert "num_hidden_layers: the heads were trained for 3" in refusal(target)


@pytest.mark.parametrize("name", ["heads.pt", "heads.bin", "gone/heads.pth"])
def test_a_named_pickle_is_refused(target: Path, tmp_path: Path, name: str) -> None:
    assert "a pickled checkpoint" in refusal(target, tmp_path / name)


@pytest.mark.parametrize("name", ["gone", "./gone", "/gone/heads", "~/heads", "a/b/c", "bdp"])
def test_a_name_that_is_nothing_is_refused(target: Path, name: str) -> None:
    message = refusal(target, name)
    assert message.startswith(f"model: '{name}' is neither a folder of heads nor a repository")


@pytest.mark.parametrize("name", ["nobody/no-such-heads", "not a/valid id", "a/..b"])
def test_a_hub_id_that_is_not_to_be_had_is_refused(target: Path, name: str) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert f"{name!r} is neither a folder of heads nor a repository" in refusal(target, name)


def test_a_target_that_is_not_to_be_had_has_no_heads(shipped: Path) -> None:
    assert resolve_target("nobody/no-such-model") is None
    assert "no heads found for nobody/no-such-model" in refusal("nobody/no-such-model")


def cache(root: Path, repository: str, commits: dict[str, Path]) -> None:
    """A hub cache with `repository` at these branches; the folders become its snapshots."""
    home = root / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "snapshots").mkdir()
    for number, (branch, folder) in enumerate(commits.items(), start=1):
        commit = str(number) * 40
        (home / "refs" / branch).write_text(commit)
        folder.rename(home / "snapshots" / commit)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_cached_repositories_serve_offline(hub: Path, tmp_path: Path, target: Path) -> None:
    heads = write_heads(tmp_path / "heads", target)
    write_heads(target / HEADS_FOLDER, target, num_draft_heads=2)
    cache(hub, "me/heads", {"main": heads})
    cache(hub, "me/model", {"main": target})
    assert find_heads("me/model").config.num_draft_heads == 2
    found = find_heads("me/model", "me/heads")
    assert (found.config.num_draft_heads, found.source) == (3, "hub repository me/heads")


def test_each_revision_is_its_own(hub: Path, tmp_path: Path) -> None:
    deeper = write_target(tmp_path / "deeper", num_hidden_layers=5)
    write_heads(deeper / HEADS_FOLDER, deeper, num_draft_heads=5)
    target = write_target(tmp_path / "target")
    write_heads(target / HEADS_FOLDER, target)
    one = write_heads(tmp_path / "one", deeper, num_draft_heads=1)
    two = write_heads(tmp_path / "two", deeper, num_draft_heads=2)
    cache(hub, "me/model", {"main": target, "deeper": deeper})
    cache(hub, "me/heads", {"main": one, "v2": two})
    assert find_heads("me/model").config.num_draft_heads == 3
    assert find_heads("me/model", target_revision="deeper").config.num_draft_heads == 5
    found = find_heads("me/model", "me/heads", "v2", target_revision="deeper")
    assert found.config.num_draft_heads == 2
    assert "num_hidden_layers" in refusal("me/model", "me/heads")


def test_shipped_heads_are_sound() -> None:
    for name in shipped_names():
        config = read_config(discovery.SHIPPED / name)
        check_weights(discovery.SHIPPED / name, config)
        assert config.target.lm_head_hash is not None, name
