"""Which ids the projection chooses, on one rank and on two, against a plain argmax.

And its candidates with their log probabilities, against a plain softmax.
"""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="the projection is vLLM's")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from tests.vllm_bpd.fresh import projected_on_rank, run_fresh
from vllm_bpd.errors import HeadsError
from vllm_bpd.lattice import CANDIDATES
from vllm_bpd.projection import DraftProjection, find_embedding, find_lm_head

ROWS, HIDDEN = 24, 16
Case = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
Found = dict[tuple[str, int], list[tuple[Tensor, Tensor, Tensor]]]


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: their products are exact in any order, so ties are ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def case(
    vocab: int, ids: Any = None, bias: bool = False, dtype: torch.dtype = torch.float32
) -> Case:
    matrix_VD = whole_numbers(vocab, HIDDEN, seed=vocab).to(dtype)
    states_ND = whole_numbers(ROWS, HIDDEN, seed=1).to(dtype)
    bias_V = whole_numbers(vocab, seed=2).to(dtype) * 9 if bias else None
    return matrix_VD, states_ND, None if ids is None else torch.tensor(list(ids)), bias_V


def tied(vocab: int, equal: list[int], ids: Any = None) -> Case:
    """The rows `equal` are alike and beat all others for every state."""
    matrix_VD, states_ND, ids_V, _ = case(vocab, ids)
    states_ND[:, 0] = 3
    matrix_VD[:, 0] = -3
    matrix_VD[equal] = 0
    matrix_VD[equal, 0] = 50
    return matrix_VD, states_ND, ids_V, None


def flat(vocab: int, ids: Any = None) -> Case:
    """No few ids have nearly all probability; sixteenths are exact, too."""
    matrix_VD, states_ND, ids_V, _ = case(vocab, ids)
    return matrix_VD, states_ND / 16, ids_V, None


# vLLM pads to a multiple of 64, so that the second of two ranks starts at 32 in a vocabulary of up
# to 64 ids, at 64 in one of up to 128, and at 96 in one of up to 192.
CASES: dict[str, Case] = {
    "even": case(128),
    "flat": flat(131),
    "flat, every third id": flat(131, range(0, 131, 3)),
    "odd": case(131),
    "second rank nearly empty": case(65),
    "second rank empty": case(30),
    "bf16": case(128, dtype=torch.bfloat16),
    "bias": case(131, bias=True),
    "tie across ranks": tied(128, [5, 100]),
    "tie on the second rank": tied(131, [97, 99, 130]),
    "every third id": case(131, range(0, 131, 3)),
    "every id": case(131, range(131)),
    "draft ids of bf16": case(128, range(1, 128, 2), dtype=torch.bfloat16),
    "draft ids of the first rank": case(128, [0, 3, 9, 63]),
    "draft ids of the second rank": case(128, [64, 65, 127]),
    "one draft id": case(131, [130]),
    "draft ids and bias": case(131, range(0, 131, 3), bias=True),
    "drafts tie across ranks": tied(128, [4, 64, 100], range(0, 128, 4)),
    "drafts tie beside a better id": tied(128, [5, 8, 100], range(0, 128, 4)),
    "the last real id": tied(131, [130], [1, 130]),
}


def all_scores(
    matrix_VD: Tensor, states_ND: Tensor, ids_V: Tensor | None, bias_V: Any
) -> tuple[Tensor, Tensor]:
    """Scores of all ids that may be drafted, float64 [N, V], and the ids, int64 [V]."""
    scores_NV = states_ND.double() @ matrix_VD.double().T
    if bias_V is not None:
        scores_NV += bias_V.double()
    if ids_V is None:
        ids_V = torch.arange(matrix_VD.shape[0])
    return scores_NV[:, ids_V], ids_V


def by_argmax(matrix_VD: Tensor, states_ND: Tensor, ids_V: Tensor | None, bias_V: Any) -> list[int]:
    """The lowest of the best ids, from all scores at once."""
    scores_NV, ids_V = all_scores(matrix_VD, states_ND, ids_V, bias_V)
    return [int(ids_V[row.eq(row.max()).nonzero()[0]]) for row in scores_NV]


@pytest.fixture(scope="module")
def chosen(fresh_process: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank chooses, by case and number of ranks."""
    found: Found = {}
    for size in (1, 2):
        folder = str(tmp_path_factory.mktemp("group"))
        everything = list(CASES.values())
        ranks = run_fresh(
            fresh_process,
            projected_on_rank,
            *[(rank, size, folder, everything) for rank in range(size)],
        )
        for name, *ids in zip(CASES, *ranks, strict=True):
            found[name, size] = ids
    return found


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_chooses_what_a_plain_argmax_does(chosen: Found, name: str, size: int) -> None:
    assert len(chosen[name, size]) == size
    for ids_N, _, _ in chosen[name, size]:
        assert ids_N.dtype == torch.int64
        assert ids_N.tolist() == by_argmax(*CASES[name])


def check_candidates(ids_NM: Tensor, logp_NM: Tensor, scores_NV: Tensor, ids_V: Tensor) -> None:
    """Against a plain softmax; which of equal ids is named is free, how probable they are not."""
    assert (ids_NM.dtype, logp_NM.dtype) == (torch.int64, torch.float32)
    assert ids_NM.shape == logp_NM.shape == (len(scores_NV), CANDIDATES)
    real = min(CANDIDATES, len(ids_V))
    assert bool((ids_NM[:, real:] == -1).all())
    assert bool((logp_NM[:, real:] == -torch.inf).all())
    column = {int(token): i for i, token in enumerate(ids_V)}
    for row, logp_V in enumerate(scores_NV.log_softmax(-1)):
        best = logp_V.sort(descending=True).values[:real]
        torch.testing.assert_close(logp_NM[row, :real].double(), best, rtol=1e-6, atol=1e-4)
        names = ids_NM[row, :real].tolist()
        assert len(set(names)) == real
        # Each named id has the probability beside it, so without ties it is the one expected.
        assert torch.equal(logp_V[[column[token] for token in names]], best)


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_candidates_of_a_plain_softmax(
    chosen: Found, name: str, size: int
) -> None:
    for _, ids_NM, logp_NM in chosen[name, size]:
        check_candidates(ids_NM, logp_NM, *all_scores(*CASES[name]))
        assert torch.equal(ids_NM, chosen[name, size][0][1])
        assert torch.equal(logp_NM, chosen[name, size][0][2])


def test_the_cases_have_ties_and_none_among_their_candidates() -> None:
    different = [
        int((scores_NV.topk(CANDIDATES).values.diff(dim=1) < 0).all(1).sum())
        for scores_NV, ids_V in (all_scores(*each) for each in CASES.values())
        if len(ids_V) >= CANDIDATES
    ]
    assert 0 < sum(different) < len(different) * ROWS


@pytest.mark.parametrize(
    ("name", "winner"),
    [
        ("tie across ranks", 5),
        ("tie on the second rank", 97),
        ("drafts tie across ranks", 4),
        ("drafts tie beside a better id", 8),
        ("the last real id", 130),
        ("one draft id", 130),
    ],
)
def test_cases_are_what_their_names_say(name: str, winner: int) -> None:
    assert by_argmax(*CASES[name]) == [winner] * ROWS


def head(**changed: Any) -> Any:
    """An LM head as far as the projection looks at one, of 6 ids and 2 padded ones."""
    made = nn.Module()
    fields = {
        "quant_method": object(),
        "shard_indices": SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=6),
        "org_vocab_size": 6,
        "tp_size": 1,
    }
    for name, value in (fields | changed).items():
        setattr(made, name, value)
    return made


class Quantised:
    """A quantised LM head's method: there is no weight to look at, only its product."""

    def __init__(self, matrix_LD: Tensor) -> None:
        self.matrix_LD = matrix_LD

    def apply(self, _layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, self.matrix_LD, bias)


@pytest.mark.row("targets")
@pytest.mark.parametrize("bias", [False, True])
def test_a_quantised_lm_head_is_called_through_its_own_method(bias: bool) -> None:
    matrix_LD = whole_numbers(8, HIDDEN, seed=3)
    matrix_LD[6:] = 1e4
    bias_L = torch.tensor([0.0, 99, 0, 500, 0, -99, 1e4, 1e4]) if bias else None
    target = nn.Module()
    target.lm_head = head(quant_method=Quantised(matrix_LD), bias=bias_L)
    with set_current_vllm_config(VllmConfig()):
        projection = DraftProjection(target, torch.tensor([1, 2, 5]))
    states_ND = whole_numbers(ROWS, HIDDEN, seed=4)
    real_bias = None if bias_L is None else bias_L[:6]
    expected = by_argmax(matrix_LD[:6], states_ND, torch.tensor([1, 2, 5]), real_bias)
    assert projection.top_tokens(states_ND).tolist() == expected
    drafted = all_scores(matrix_LD[:6], states_ND, torch.tensor([1, 2, 5]), real_bias)
    check_candidates(*projection.top_candidates(states_ND, CANDIDATES), *drafted)


@pytest.mark.row("targets")
@pytest.mark.parametrize("bias", [False, True])
def test_padding_of_a_quantised_lm_head_is_no_candidate(bias: bool) -> None:
    matrix_LD = whole_numbers(24, HIDDEN, seed=3)
    matrix_LD[20:] = 1e4
    bias_L = 9 * whole_numbers(24, seed=5) if bias else None
    target = nn.Module()
    shard = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=20)
    target.lm_head = head(
        quant_method=Quantised(matrix_LD), bias=bias_L, shard_indices=shard, org_vocab_size=20
    )
    with set_current_vllm_config(VllmConfig()):
        projection = DraftProjection(target, None)
    states_ND = whole_numbers(ROWS, HIDDEN, seed=4)
    real_bias = None if bias_L is None else bias_L[:20]
    scored = all_scores(matrix_LD[:20], states_ND, None, real_bias)
    check_candidates(*projection.top_candidates(states_ND, CANDIDATES), *scored)


@pytest.mark.parametrize("kind", [UnquantizedLinearMethod, UnquantizedEmbeddingMethod])
def test_a_plain_lm_head_whose_weight_was_packed_away_is_called_too(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, vLLM keeps no plain copy of an LM head that a quantised target leaves alone."""
    matrix_LD = whole_numbers(6, HIDDEN, seed=3)
    quantised = Quantised(matrix_LD)
    monkeypatch.setattr(kind, "apply", lambda _, *given, **named: quantised.apply(*given, **named))
    packed = nn.Parameter(torch.empty(0), requires_grad=False)
    target = nn.Module()
    target.lm_head = head(quant_method=kind.__new__(kind), weight=packed)
    with set_current_vllm_config(VllmConfig()):
        projection = DraftProjection(target, torch.tensor([1, 2, 5]))
    states_ND = whole_numbers(ROWS, HIDDEN, seed=4)
    expected = by_argmax(matrix_LD, states_ND, torch.tensor([1, 2, 5]), None)
    assert projection.top_tokens(states_ND).tolist() == expected


def test_the_lm_head_is_found_where_it_is() -> None:
    own, tied_one, wrapped = head(), head(), nn.Module()
    wrapped.base_layer = own
    target = nn.Module()
    target.model = nn.Module()
    target.model.embed_tokens = tied_one
    assert find_lm_head(target) is tied_one
    target.lm_head = nn.Identity()  # a placeholder, as on a rank without the last layers
    assert find_lm_head(target) is tied_one
    target.lm_head = wrapped  # as LoRA does
    assert find_lm_head(target) is own
    target.lm_head = own
    assert find_lm_head(target) is own


def test_heads_read_the_embedding_inside_loras() -> None:
    """A wrapped one adds what the running batch's adapters say, in the batch's own order."""
    target = nn.Module()
    own: Any = lambda ids_B: ids_B  # noqa: E731
    target.embed_input_ids = own
    assert find_embedding(target) is own
    wrapped = VocabParallelEmbeddingWithLoRA.__new__(VocabParallelEmbeddingWithLoRA)
    nn.Module.__init__(wrapped)
    wrapped.base_layer = nn.Identity()
    target.transformer = nn.Module()
    target.transformer.wte = wrapped
    assert find_embedding(target) is wrapped.base_layer


def test_a_target_without_an_lm_head_is_refused() -> None:
    with pytest.raises(HeadsError, match=r"^model: Module shows no lm_head of vLLM's; bpd needs"):
        find_lm_head(nn.Module())
