"""The lattice's weights in a checkpoint: read strictly, written whole, and optional."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.vllm_bpd.samples import heads_config, lattice_weights, one_line, random_heads
from vllm_bpd.checkpoint import (
    CONFIG_FILE,
    LATTICE_WEIGHTS,
    WEIGHTS_FILE,
    expected_tensors,
    load_heads,
    load_lattice,
    read_config,
    save_heads,
)
from vllm_bpd.errors import HeadsError
from vllm_bpd.lattice import NUM_WEIGHTS

PLACES = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three heads with a lattice of five places."""
    weights_PW = lattice_weights(PLACES)
    save_heads(tmp_path / "heads", random_heads(heads_config()), lattice_weights_PW=weights_PW)
    return tmp_path / "heads"


def rewrite(folder: Path, weights_PW: Tensor | None) -> None:
    """Replace the lattice's weights; None removes them."""
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors.pop(LATTICE_WEIGHTS, None)
    if weights_PW is not None:
        tensors[LATTICE_WEIGHTS] = weights_PW
    save_file(tensors, folder / WEIGHTS_FILE)


def refusals(folder: Path) -> set[str]:
    """What reading the lattice, and reading the heads, says."""
    said = set()
    for read in (load_lattice, load_heads):
        with pytest.raises(HeadsError) as caught:
            read(folder)
        said.add(one_line(caught.value))
    return said


def test_what_is_written_is_read_back(folder: Path) -> None:
    read_PW = load_lattice(folder)
    assert read_PW is not None
    assert read_PW.dtype == torch.float32
    assert torch.equal(read_PW, lattice_weights(PLACES))
    assert read_config(folder) == heads_config(lattice_places=PLACES)
    heads, _ = load_heads(folder, torch.bfloat16)
    expected = random_heads(heads_config()).state_dict()
    assert heads.state_dict().keys() == expected.keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name


def test_weights_are_float32_whatever_the_heads_are(tmp_path: Path) -> None:
    weights_PW = (torch.arange(4 * NUM_WEIGHTS, dtype=torch.float64) / 3).view(4, NUM_WEIGHTS)
    save_heads(tmp_path, random_heads(heads_config()), lattice_weights_PW=weights_PW)
    read_PW = load_lattice(tmp_path)
    assert read_PW is not None
    assert torch.equal(read_PW, weights_PW.float())


def test_heads_without_a_lattice_have_none(folder: Path) -> None:
    heads, _ = load_heads(folder)
    save_heads(folder, heads)  # no weights are given, so the older ones go
    assert load_lattice(folder) is None
    assert read_config(folder).lattice_places is None
    assert LATTICE_WEIGHTS not in load_file(folder / WEIGHTS_FILE)


def test_expected_tensors_have_the_documented_shapes() -> None:
    assert LATTICE_WEIGHTS not in expected_tensors(heads_config())
    config = heads_config(lattice_places=PLACES)
    assert expected_tensors(config)["lattice_weights"] == (5, 4 + 17 + 17)


def test_missing_weights_are_named(folder: Path) -> None:
    rewrite(folder, None)
    assert refusals(folder) == {
        f"{folder / WEIGHTS_FILE}: lattice_weights: missing; expected shape (5, 38)"
    }


def test_weights_that_the_config_does_not_announce_are_unused(folder: Path) -> None:
    values = json.loads((folder / CONFIG_FILE).read_text())
    del values["lattice_places"]
    (folder / CONFIG_FILE).write_text(json.dumps(values))
    [said] = refusals(folder)
    assert said.startswith(f"{folder / WEIGHTS_FILE}: lattice_weights: unused; expected only ")


@pytest.mark.parametrize("shape", [(4, 38), (5, 37), (38, 5), (5 * 38,), (1, 5, 38)])
def test_misshapen_weights_are_named_with_both_shapes(folder: Path, shape: tuple[int, ...]) -> None:
    rewrite(folder, torch.zeros(shape))
    assert refusals(folder) == {
        f"{folder / WEIGHTS_FILE}: lattice_weights: found shape {shape}; config.json says (5, 38)"
    }


@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        (torch.float64, "F64"),
        (torch.bfloat16, "BF16"),
        (torch.float16, "F16"),
        (torch.int32, "I32"),
    ],
)
def test_a_wrong_dtype_is_named(folder: Path, dtype: torch.dtype, found: str) -> None:
    rewrite(folder, lattice_weights(PLACES).to(dtype))
    assert refusals(folder) == {
        f"{folder / WEIGHTS_FILE}: lattice_weights: found dtype {found}; expected F32"
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_are_finite(folder: Path, value: float) -> None:
    weights_PW = lattice_weights(PLACES)
    weights_PW[4, 37] = value
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(HeadsError) as caught:
        save_heads(folder, random_heads(heads_config()), lattice_weights_PW=weights_PW)
    finite = "lattice_weights: found values that are not finite; train them again"
    assert one_line(caught.value) == finite
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    rewrite(folder, weights_PW)
    assert refusals(folder) == {f"{folder / WEIGHTS_FILE}: {finite}"}


@pytest.mark.parametrize(
    ("weights_PW", "said"),
    [
        (torch.zeros(2, NUM_WEIGHTS), "lattice_places: found 2; expected at least num_draft_heads"),
        (torch.zeros(0, NUM_WEIGHTS), "lattice_places: found 0; expected a whole number"),
        (torch.zeros(4, NUM_WEIGHTS + 1), "lattice_weights: found shape (4, 39); expected (4, 38)"),
        (torch.zeros(NUM_WEIGHTS), "lattice_weights: found shape (38,); expected (38, 38)"),
    ],
    ids=["fewer places than heads", "no place", "too wide", "one row"],
)
def test_weights_that_cannot_be_are_not_written(
    tmp_path: Path, weights_PW: Tensor, said: str
) -> None:
    with pytest.raises(HeadsError) as caught:
        save_heads(tmp_path / "heads", random_heads(heads_config()), lattice_weights_PW=weights_PW)
    assert one_line(caught.value).startswith(said)
    assert not any(tmp_path.iterdir())


def test_fewer_places_than_heads_are_refused_by_file(folder: Path) -> None:
    values = json.loads((folder / CONFIG_FILE).read_text()) | {"lattice_places": 2}
    (folder / CONFIG_FILE).write_text(json.dumps(values))
    assert refusals(folder) == {
        f"{folder / CONFIG_FILE}: lattice_places: found 2; expected at least num_draft_heads, 3, "
        "or null"
    }
