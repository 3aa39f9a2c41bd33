"""Fewer heads are the first ones, and everything else stays."""

from __future__ import annotations

import torch

from benchmarks.fewer_heads import CUTS, first_heads, variants
from heads_training.lattice_fit import Lattice
from vllm_bpd.lattice import MATCHES

ROWS, HEADS, PLACES = 24, 3, 4


def lattice() -> Lattice:
    """Heads that are always right at the first place, wrong behind it; no text."""
    right_TP = torch.arange(ROWS)[:, None] + torch.arange(PLACES)
    ids_TKM = torch.full((ROWS, HEADS, 1), 999)
    ids_TKM[:, 0, 0] = right_TP[:, 0]
    return Lattice(
        ids_TKM,
        torch.full((ROWS, HEADS, 1), -0.1),
        torch.full((ROWS, MATCHES), -1),
        torch.zeros(ROWS, MATCHES, dtype=torch.int64),
        right_TP,
    )


def test_the_first_heads_stay_as_they_are() -> None:
    whole = lattice()
    first = first_heads(whole, 2)
    assert torch.equal(first.head_ids_TKM, whole.head_ids_TKM[:, :2])
    assert torch.equal(first.head_logp_TKM, whole.head_logp_TKM[:, :2])
    assert first.right_TP is whole.right_TP


def test_every_number_of_heads_is_fitted_and_drafts() -> None:
    found = variants(lattice(), lattice(), PLACES)
    assert list(found) == [f"heads {n}, cut {cut}" for n in range(1, HEADS + 1) for cut in CUTS]
    for variant in found.values():
        assert variant.drafted.match_TP[:, 0].all()
        assert not variant.drafted.match_TP[:, 1:].any()
