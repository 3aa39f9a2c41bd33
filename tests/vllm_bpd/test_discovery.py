"""Where heads are looked for, in which order, and what is said when none fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_bpd.samples import (
    HIDDEN,
    LM_HEAD,
    VOCAB,
    one_line,
    random_matrix,
    write_heads,
    write_target,
)
from vllm_bpd import discovery
from vllm_bpd.checkpoint import WEIGHTS_FILE, check_weights, read_config
from vllm_bpd.discovery import (
    HEADS_FOLDER,
    check_weights_on_disk,
    find_heads,
    resolve_target,
    shipped_names,
    weights_folder,
)
from vllm_bpd.errors import HeadsError, shown


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


@pytest.mark.parametrize(
    "name",
    ["gone", "./gone", "/gone/heads", "~/heads", "a/b/c", "bdp", "x" * 999, "a/" + "x" * 999],
)
def test_a_name_that_is_nothing_is_refused(target: Path, name: str) -> None:
    message = refusal(target, name)
    assert message.startswith(f"model: {shown(name)} is neither a folder of heads nor a repository")


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


@pytest.fixture
def undownloaded(hub: Path, tmp_path: Path, target: Path) -> Path:
    """The weights of me/model, of whose files the hub's cache has config.json alone."""
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_bytes((target / "config.json").read_bytes())
    cache(hub, "me/model", {"main": config})
    return target / WEIGHTS_FILE


def test_heads_of_other_weights_are_refused_once_those_are_on_disk(
    hub: Path, tmp_path: Path, undownloaded: Path
) -> None:
    """At a first start the engine downloads weights after it has found the heads."""
    other = write_target(tmp_path / "other", {LM_HEAD: random_matrix(VOCAB, HIDDEN, seed=9)})
    heads = write_heads(tmp_path / "heads", other)
    found = find_heads("me/model", str(heads))
    folder = weights_folder("me/model")
    assert folder is not None
    check_weights_on_disk(heads, found.config, folder, tied=False)  # nothing to compare
    check_weights_on_disk(heads, found.config, None, tied=False)
    undownloaded.rename(folder / WEIGHTS_FILE)
    with pytest.raises(HeadsError) as caught:
        check_weights_on_disk(heads, found.config, folder, tied=False)
    message = one_line(caught.value)
    assert message.startswith(f"{heads}: these heads belong to another target; lm_head_hash: ")
    assert message == refusal("me/model", heads)  # as at the second start
    check_weights_on_disk(other, read_config(write_heads(tmp_path / "own", folder)), folder, False)


@pytest.mark.parametrize(
    ("revision", "download_dir", "options"),
    [(None, None, ""), ("main", "/weights", " --revision main --cache-dir /weights")],
)
def test_shipped_heads_wait_for_weights_that_are_not_downloaded(
    hub: Path,
    tmp_path: Path,
    shipped: Path,
    undownloaded: Path,
    revision: str | None,
    download_dir: str | None,
    options: str,
) -> None:
    write_heads(shipped / "other", write_target(tmp_path / "other", {}, num_hidden_layers=3))
    with pytest.raises(HeadsError, match="no heads found for me/model; looked in"):
        find_heads("me/model")  # none that the weights could speak for
    write_heads(shipped / "tiny", undownloaded.parent)
    with pytest.raises(HeadsError) as caught:
        find_heads("me/model", target_revision=revision, download_dir=download_dir)
    assert one_line(caught.value) == (
        "model: no heads found for me/model: whether those shipped as tiny are its own shows in "
        f"its weights, which are not downloaded yet; run `hf download me/model{options}` and "
        'start again, or name heads as {"method": "bpd", "model": "DIR_OR_HUB_ID"}'
    )
    folder = weights_folder("me/model")
    assert folder is not None
    undownloaded.rename(folder / WEIGHTS_FILE)
    assert find_heads("me/model").source == "shipped with vllm-bpd as tiny"


def test_weights_are_looked_for_where_the_engine_puts_them(
    hub: Path, tmp_path: Path, shipped: Path, undownloaded: Path
) -> None:
    """With --download-dir the hub's own cache has config.json, and the folder has the weights."""
    write_heads(shipped / "tiny", undownloaded.parent)
    weights, newer = tmp_path / "weights", tmp_path / "newer"
    for folder in (weights, newer):
        folder.mkdir()
    undownloaded.rename(weights / WEIGHTS_FILE)
    elsewhere = tmp_path / "elsewhere"
    assert weights_folder("me/model", None, str(elsewhere)) == resolve_target("me/model")
    cache(elsewhere, "me/model", {"old": weights, "main": newer})
    found = weights_folder("me/model", None, str(elsewhere))
    assert found == elsewhere / "models--me--model" / "snapshots" / ("1" * 40)  # config's commit
    assert find_heads("me/model", download_dir=str(elsewhere)).config.num_draft_heads == 3
    (hub / "models--me--model" / "refs" / "main").unlink()  # a worker's machine: no config.json
    found = weights_folder("me/model", None, str(elsewhere))
    assert found == elsewhere / "models--me--model" / "snapshots" / ("2" * 40)
    assert weights_folder(str(tmp_path), None, str(elsewhere)) == tmp_path


def test_shipped_heads_are_sound() -> None:
    for name in shipped_names():
        config = read_config(discovery.SHIPPED / name)
        check_weights(discovery.SHIPPED / name, config)
        assert config.target.lm_head_hash is not None, name
