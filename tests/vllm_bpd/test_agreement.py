"""Every machine finds the same heads, or says in one line which others it found, and where."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm_bpd.samples import one_line, write_heads, write_target
from vllm_bpd import agreement
from vllm_bpd.agreement import PIECE_BYTES, PIECES, Provenance, heads_digest, provenance
from vllm_bpd.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from vllm_bpd.discovery import SHIPPED, shipped_names
from vllm_bpd.errors import HeadsError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return write_heads(tmp_path / "heads", write_target(tmp_path / "target"))


def refusal(found: Provenance) -> str:
    with pytest.raises(HeadsError) as caught:
        found.here()
    return one_line(caught.value)


def test_the_same_folder_is_found_again(heads: Path) -> None:
    found = provenance(heads)
    assert found.here() == heads
    assert (found.repository, found.shipped) == (None, None)


def test_a_relative_folder_means_the_front_ends(
    heads: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(heads.parent)
    found = provenance(Path("heads"))
    monkeypatch.chdir(tmp_path.parent)
    assert found.here() == heads


def test_a_copy_has_the_same_digest(heads: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(heads, tmp_path / "copy"))
    assert heads_digest(copy) == heads_digest(heads)


def flip(path: Path, place: int) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda heads: flip(heads / WEIGHTS_FILE, -1),
        lambda heads: flip(heads / WEIGHTS_FILE, 20),
        lambda heads: flip(heads / CONFIG_FILE, 5),
        lambda heads: os.truncate(heads / WEIGHTS_FILE, (heads / WEIGHTS_FILE).stat().st_size + 1),
    ],
    ids=["last byte", "header", "config", "longer"],
)
def test_other_heads_are_refused_with_host_path_and_both_digests(
    heads: Path, change: Callable[[Path], object]
) -> None:
    found = provenance(heads)
    change(heads)
    assert refusal(found) == (
        f"model: on host {socket.gethostname()}, {heads}: found heads of digest "
        f"{heads_digest(heads)[:12]}; the front end has {found.digest[:12]}; copy the same "
        "checkpoint to every node"
    )


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_heads_that_are_not_there_are_missed_by_name(heads: Path, name: str) -> None:
    found = provenance(heads)
    (heads / name).unlink()
    assert refusal(found) == (
        f"model: on host {socket.gethostname()}, {heads}: no heads there; expected those of "
        f"digest {found.digest[:12]} that the front end found: put them on storage that every "
        "node sees at the same path, or name a hub id"
    )


def test_large_weights_are_hashed_in_pieces(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, both ends and evenly spaced pieces; what lies between does not count."""
    weights = heads / WEIGHTS_FILE
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    with weights.open("ab") as file:
        file.truncate(3 * PIECES * PIECE_BYTES)
    monkeypatch.setattr(agreement, "WHOLE_BYTES", 2 * PIECES * PIECE_BYTES)
    whole = heads_digest(heads)
    last = weights.stat().st_size - PIECE_BYTES
    hashed = (0, header - 1, 7 * last // (PIECES - 1), 7 * last // (PIECES - 1) + PIECE_BYTES - 1)
    for place in (*hashed, last, last + PIECE_BYTES - 1):
        flip(weights, place)
        assert heads_digest(heads) != whole, place
        flip(weights, place)
    flip(weights, 7 * last // (PIECES - 1) + PIECE_BYTES)
    assert heads_digest(heads) == whole


def test_shipped_heads_are_found_in_each_machines_own_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = shipped_names()[0]
    found = provenance(SHIPPED / name)
    elsewhere = tmp_path / "site-packages"
    shutil.copytree(SHIPPED / name, elsewhere / name)
    monkeypatch.setattr(agreement, "SHIPPED", elsewhere)
    assert found.here() == elsewhere / name


def snapshot(cache: Path, heads: Path, inside: str = ".") -> Path:
    """The heads as a hub cache keeps those of `me/heads` at COMMIT."""
    folder = cache / "models--me--heads" / "snapshots" / COMMIT / inside
    return Path(shutil.copytree(heads, folder))


@pytest.mark.parametrize("inside", [".", "bpd_heads"])
def test_a_hub_id_is_one_commit_on_every_machine(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """Another machine's cache lies elsewhere, and its branch may have moved on."""
    ours = snapshot(tmp_path / "ours", heads, inside)
    found = provenance(ours)
    assert (found.repository, found.commit, found.inside) == ("me/heads", COMMIT, inside)
    theirs = snapshot(tmp_path / "theirs", heads, inside)
    shutil.rmtree(tmp_path / "ours")
    asked = []

    def from_hub(*arguments: object) -> Path:
        asked.append(arguments)
        return theirs if inside == "." else theirs.parent

    monkeypatch.setattr(agreement, "from_hub", from_hub)
    assert found.here("a token") == theirs
    files = [(Path(inside) / name).as_posix() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    assert asked == [("me/heads", COMMIT, "a token", files)]


def test_offline_only_the_machines_own_cache_is_asked(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    ours = snapshot(tmp_path / "ours", heads)
    found = provenance(ours)
    shutil.rmtree(tmp_path / "ours")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "theirs"))
    assert refusal(found) == (
        f"model: on host {socket.gethostname()}, me/heads at {COMMIT} is neither in the hub cache "
        "nor to be had from the hub; download it there, or share the cache (HF_HOME)"
    )
    theirs = snapshot(tmp_path / "theirs", heads)
    assert found.here() == theirs
