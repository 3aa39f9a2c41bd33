"""The heads as a vLLM model: sharded they equal the plain ones, and weights are taken strictly."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="the model is made of vLLM's layers")

from vllm.config import LoadConfig
from vllm.model_executor import model_loader

from tests.vllm_bpd.fresh import head_states_on_rank, load_refusals, run_fresh
from tests.vllm_bpd.samples import (
    HIDDEN,
    fingerprint,
    heads_config,
    lattice_weights,
    one_line,
    random_heads,
    write_target,
)
from vllm_bpd import model as model_module
from vllm_bpd.checkpoint import LATTICE_WEIGHTS
from vllm_bpd.errors import HeadsError
from vllm_bpd.few_rows import FewRowsRounded
from vllm_bpd.lattice import CANDIDATES, NUM_WEIGHTS
from vllm_bpd.model import BlockwiseHeadsModel, load_heads_model

ROWS = 7
CASES: dict[str, tuple[Any, int, str]] = {
    "all heads": (heads_config(), 3, "ColumnParallelLinear"),
    "fewer heads": (heads_config(), 2, "ColumnParallelLinear"),
    "no conditioning": (heads_config(conditioning="none"), 3, "ColumnParallelLinear"),
    "relu": (heads_config(activation="relu"), 3, "ColumnParallelLinear"),
    "gelu": (heads_config(activation="gelu"), 1, "ColumnParallelLinear"),
    "odd joint size": (heads_config(head_hidden_size=7), 3, "ReplicatedLinear"),
    "odd joint size, fewer": (heads_config(head_hidden_size=7), 2, "ReplicatedLinear"),
}


def inputs(config: Any) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    hidden_BD = torch.randn(ROWS, HIDDEN, generator=generator)
    embedding_BD = torch.randn(ROWS, HIDDEN, generator=generator)
    return hidden_BD, None if config.conditioning == "none" else embedding_BD


@pytest.fixture(scope="module")
def states(
    fresh_process: ForkServerContext, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], list[tuple[str, Tensor]]]:
    """Kind of layer and head states on each rank, by case and number of ranks."""
    cases = [
        (config, random_heads(config).state_dict(), count, *inputs(config))
        for config, count, _ in CASES.values()
    ]
    found: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
    for size in (1, 2):
        folder = str(tmp_path_factory.mktemp("group"))
        ranks = run_fresh(
            fresh_process, head_states_on_rank, *[(r, size, folder, cases) for r in range(size)]
        )
        for name, *each in zip(CASES, *ranks, strict=True):
            found[name, size] = each
    return found


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("name", CASES)
def test_sharded_heads_equal_the_plain_ones(
    states: dict[tuple[str, int], list[tuple[str, Tensor]]], name: str, size: int
) -> None:
    config, count, kind = CASES[name]
    with torch.no_grad():
        expected_BKD = random_heads(config)(*inputs(config))[:, :count]
    assert len(states[name, size]) == size
    for found, states_BKD in states[name, size]:
        assert found == (kind if size == 2 else "ColumnParallelLinear")
        torch.testing.assert_close(states_BKD, expected_BKD, rtol=0, atol=1e-5)


def test_weights_are_taken_strictly(
    fresh_process: ForkServerContext, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = heads_config(draft_vocab_size=3, lattice_places=4)
    whole = random_heads(config).state_dict() | {
        "draft_token_ids": torch.tensor([1, 2, 9]),
        LATTICE_WEIGHTS: lattice_weights(4),
    }
    cases: dict[str, dict[str, Tensor]] = {
        "nothing was refused": whole,
        "HeadsError: extra: unused tensor; expected hidden_layer.weight, output_layer.weight": (
            whole | {"extra": torch.zeros(1)}
        ),
        "HeadsError: draft_token_ids: found ids 1..9, not ascending": (
            whole | {"draft_token_ids": torch.tensor([1, 9, 2])}
        ),
        "HeadsError: lattice_weights: found shape (3, 38); expected (4, 38)": (
            whole | {LATTICE_WEIGHTS: lattice_weights(3)}
        ),
        "HeadsError: lattice_weights: found values that are not finite; train them again": (
            whole | {LATTICE_WEIGHTS: torch.full((4, NUM_WEIGHTS), torch.nan)}
        ),
    }
    for name in whole:
        rest = {other: tensor for other, tensor in whole.items() if other != name}
        cases[f"HeadsError: {name}: missing from the heads' weights"] = rest
    folder = str(tmp_path_factory.mktemp("group"))
    [said] = run_fresh(fresh_process, load_refusals, (0, 1, folder, config, list(cases.values())))
    for expected, message in zip(cases, said, strict=True):
        assert message.startswith(expected)


class FirstColumns:
    """A projection that tells which states it was given."""

    def top_tokens(self, states_ND: Tensor) -> Tensor:
        return states_ND[:, 0].long()

    def top_candidates(self, states_ND: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return states_ND[:, :count].long(), states_ND[:, 1 : count + 1]


def plain_model(config: Any, places: int | None = None) -> tuple[Any, list[list[int]]]:
    """The model around plain heads, with no engine, and the ids whose embedding it asks for."""
    model: Any = BlockwiseHeadsModel.__new__(BlockwiseHeadsModel)
    nn.Module.__init__(model)
    model.config, model.heads, model.projection = config, random_heads(config), FirstColumns()
    model.places, model.num_ranks = places, 1
    model.lattice_weights_PF = model.draft_token_ids_V = model.embed = None
    embedded: list[list[int]] = []

    def embed(ids_B: Tensor) -> Tensor:
        embedded.append(ids_B.tolist())
        return torch.ones(len(ids_B), HIDDEN)

    if config.conditioning != "none":
        model.embed = embed
    return model, embedded


@pytest.mark.parametrize("conditioning", ["none", "sampled_token"])
def test_drafts_are_a_row_a_request_and_a_column_a_head(conditioning: str) -> None:
    config = heads_config(conditioning=conditioning)
    model, embedded = plain_model(config)
    hidden_BD = inputs(config)[0] * 10
    with torch.no_grad():
        drafts_BK = model(hidden_BD, torch.arange(ROWS))
        ids_BKM, logp_BKM = model.candidates(hidden_BD, torch.arange(ROWS))
        ones = None if conditioning == "none" else torch.ones(ROWS, HIDDEN)
        states_BKD = model.heads(hidden_BD, ones)
    assert torch.equal(drafts_BK, states_BKD[:, :, 0].long())
    assert torch.equal(ids_BKM, states_BKD[:, :, :CANDIDATES].long())
    assert torch.equal(logp_BKM, states_BKD[:, :, 1 : CANDIDATES + 1])
    assert embedded == ([] if conditioning == "none" else [list(range(ROWS))] * 2)


@pytest.mark.parametrize("places", [1, 3, 5])
def test_a_lattice_keeps_the_weights_of_the_places_that_are_drafted(places: int) -> None:
    model, _ = plain_model(heads_config(lattice_places=5), places)
    weights_PF = lattice_weights(5)
    tensors = model.heads.state_dict() | {LATTICE_WEIGHTS: weights_PF}
    loaded = model.load_weights(tensors.items())
    assert loaded == {"heads.hidden_layer.weight", "heads.output_layer.weight"}
    assert torch.equal(model.lattice_weights_PF, weights_PF[:places])


def test_without_a_lattice_there_are_no_weights_and_none_are_taken() -> None:
    model, _ = plain_model(heads_config(), 3)
    tensors = model.heads.state_dict()
    model.load_weights(tensors.items())
    assert model.lattice_weights_PF is None
    with pytest.raises(HeadsError, match=r"^lattice_weights: unused tensor; expected hidden_layer"):
        model.load_weights((tensors | {LATTICE_WEIGHTS: lattice_weights(3)}).items())


@pytest.mark.parametrize(
    ("dtype", "num_ranks", "rounds"),
    [(torch.bfloat16, 1, True), (torch.bfloat16, 2, False), (torch.float32, 1, False)],
)
def test_weights_are_kept_rounded_beside(dtype: torch.dtype, num_ranks: int, rounds: bool) -> None:
    """In bfloat16, where no other rank adds its part; the drafts' states hardly differ."""
    model, _ = plain_model(heads_config(target=fingerprint(hidden_size=32), head_hidden_size=32))
    model.heads.to(dtype)
    model.num_ranks = num_ranks
    hidden_BD, embedding_BD = torch.randn(2, 5, 32).to(dtype)
    with torch.inference_mode():
        exact_BKD = model.heads(hidden_BD, embedding_BD)
        model.load_weights(list(model.heads.state_dict().items()))
        states_BKD = model.heads(hidden_BD, embedding_BD)
    for layer in (model.heads.hidden_layer, model.heads.output_layer):
        assert isinstance(layer, FewRowsRounded) == rounds
    assert torch.equal(states_BKD, exact_BKD) != rounds
    torch.testing.assert_close(states_BKD, exact_BKD, rtol=0, atol=0.1)


def test_heads_are_loaded_from_where_this_machine_has_the_front_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def here(token: str) -> Path:
        asked.append(token)
        return Path("/here")

    found: Any = SimpleNamespace(
        provenance=SimpleNamespace(here=here),
        draft_model_config=SimpleNamespace(
            model="/there", hf_config=SimpleNamespace(heads=heads_config())
        ),
        draft_load_config=SimpleNamespace(load_format="safetensors"),
    )
    config: Any = SimpleNamespace(
        speculative_config=found,
        model_config=SimpleNamespace(
            hf_token="a token",
            model="/target",
            revision=None,
            hf_text_config=SimpleNamespace(tie_word_embeddings=False),
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir="/weights"),
        device_config=SimpleNamespace(device="cpu"),
    )
    loaded, _ = plain_model(heads_config())
    loaded.bind = lambda target: None
    from_folders = []

    formats = []

    def get_model(model_config: Any, load_config: Any, **_: Any) -> Any:
        from_folders.append(model_config.model)
        formats.append(load_config.load_format)
        return loaded

    monkeypatch.setattr(model_loader, "get_model", get_model)
    assert load_heads_model(config, nn.Module()) is loaded
    assert (asked, from_folders) == (["a token"], ["/here"])
    found.draft_load_config.load_format = "dummy"  # no file is read
    load_heads_model(config, nn.Module())
    assert asked == ["a token"]
    assert formats == ["safetensors", "dummy"]
    found.draft_load_config = LoadConfig()  # "auto"
    load_heads_model(config, nn.Module())
    assert formats[2:] == ["safetensors"]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("download_dir", [None, "/weights"])
def test_heads_are_compared_with_the_weights_that_were_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load_format: str, download_dir: str | None
) -> None:
    """The front end cannot where the hub's files were not downloaded yet."""
    target = write_target(tmp_path / "target")
    asked = []

    def weights(*arguments: Any) -> Path:
        asked.append(arguments)
        return target

    def get_model(**_: Any) -> Any:
        raise AssertionError("loaded heads of another target")

    monkeypatch.setattr(model_module, "weights_folder", weights)
    monkeypatch.setattr(model_loader, "get_model", get_model)
    speculative = SimpleNamespace(
        provenance=SimpleNamespace(here=lambda token: Path("/heads")),
        draft_model_config=SimpleNamespace(
            model="/heads", hf_config=SimpleNamespace(heads=heads_config())
        ),
        draft_load_config=SimpleNamespace(load_format="safetensors"),
    )
    config: Any = SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(
            hf_token=None, model="me/model", revision="v2", hf_text_config=SimpleNamespace()
        ),
        load_config=SimpleNamespace(load_format=load_format, download_dir=download_dir),
    )
    if load_format == "dummy":
        with pytest.raises(AssertionError, match="loaded heads"):
            load_heads_model(config, nn.Module())
        assert not asked
        return
    with pytest.raises(HeadsError) as caught:
        load_heads_model(config, nn.Module())
    assert one_line(caught.value).startswith(
        "/heads: these heads belong to another target; lm_head_hash: the heads were trained for "
        "000000000000, this target has "
    )
    assert asked == [("me/model", "v2", download_dir)]
