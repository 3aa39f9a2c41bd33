"""Fitting the lattice: its examples, what weights learn from planted ones, and what is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads_training import lattice_fit
from heads_training.dataset import IGNORED, label_text, read_texts
from heads_training.hidden_states import write_states
from heads_training.lattice_fit import Drafted, Lattice
from heads_training.records import Record
from heads_training.target import read_rows
from tests.vllm_bpd.plain_lattice import matches_of, random_heads_say, random_weights, texts
from vllm_bpd import lattice
from vllm_bpd.config import HeadsConfig
from vllm_bpd.heads import BlockwiseHeads, drafted_position
from vllm_bpd.lattice import CANDIDATES, LONGEST_MATCH, MATCH, MATCHES, NONE

seeds = st.integers(0, 2**31)
NEVER = 10**6  # an id that is no candidate


@settings(deadline=None, max_examples=60)
@given(texts(), texts())
def test_matches_of_each_row_are_those_of_its_own_window(
    prompt: list[int], answer: list[int]
) -> None:
    ids_NR, runs_NR = lattice_fit.text_matches(torch.tensor(prompt), torch.tensor(answer))
    assert ids_NR.dtype == runs_NR.dtype == torch.int64
    assert ids_NR.shape == runs_NR.shape == (len(answer), MATCHES)
    for row, (ids, runs) in enumerate(zip(ids_NR.tolist(), runs_NR.tolist(), strict=True)):
        found = matches_of(prompt + answer[: row + 1])
        expected = found + [(-1, 0)] * (MATCHES - len(found))
        assert list(zip(ids, runs, strict=True)) == expected


@pytest.mark.parametrize("places", [1, 3, 9])
def test_right_tokens_are_those_that_heads_are_trained_to_draft(places: int) -> None:
    prompt, answer = torch.tensor([7, 8]), torch.tensor([10, 11, 12, 13])
    text = [*prompt.tolist(), *answer.tolist()]
    right_NP = lattice_fit.right_tokens(answer, places)
    for row in range(len(answer)):
        for place in range(places):
            index = drafted_position(len(prompt) - 1 + row, place)
            assert right_NP[row, place] == (text[index] if index < len(text) else -1)
    _, next_NP = label_text(prompt, answer, places)
    assert torch.equal(right_NP, torch.where(next_NP == IGNORED, -1, next_NP))


def planted(
    head_ids: list[int], match_ids: list[int], runs: list[int], right: list[int], logp: float = -0.5
) -> Lattice:
    """Rows where one head says one token and one match goes on with another; one place."""
    rows = len(right)
    match_ids_TR = torch.full((rows, 2), -1)
    match_ids_TR[:, 0] = torch.tensor(match_ids)
    match_runs_TR = torch.zeros(rows, 2, dtype=torch.int64)
    match_runs_TR[:, 0] = torch.tensor(runs)
    return Lattice(
        torch.tensor(head_ids).view(rows, 1, 1),
        torch.full((rows, 1, 1), logp),
        match_ids_TR,
        match_runs_TR,
        torch.tensor(right).view(rows, 1),
    )


def drafted_ids(rows: Lattice, weights_PF: Tensor) -> tuple[list[int], Tensor]:
    """What is drafted at the first place of every row, and how sure that is."""
    everything = torch.arange(len(rows.right_TP))
    ids_B, confidence_B, _ = lattice.choose(rows.at(everything, 0), weights_PF[0])
    return ids_B.tolist(), confidence_B


def test_the_text_is_followed_where_it_is_always_right() -> None:
    tokens = list(range(200))
    rows = planted([t + 500 for t in tokens], tokens, [1] * 200, tokens)
    start_PF = lattice_fit.initial_weights().unsqueeze(0)
    ids, _ = drafted_ids(rows, start_PF)
    assert ids == [t + 500 for t in tokens]  # one token alone says little until it is known to
    ids, confidence_B = drafted_ids(rows, lattice_fit.fit_weights(rows, 1))
    assert ids == tokens
    assert confidence_B.min() > 0.9


def test_the_heads_are_followed_where_the_text_is_never_right() -> None:
    tokens = list(range(200))
    rows = planted([t + 500 for t in tokens], tokens, [16] * 200, [t + 500 for t in tokens])
    start_PF = lattice_fit.initial_weights().unsqueeze(0)
    start_PF[0, lattice.SHARE] = 8
    assert drafted_ids(rows, start_PF)[0] == tokens
    ids, confidence_B = drafted_ids(rows, lattice_fit.fit_weights(rows, 1))
    assert ids == [t + 500 for t in tokens]
    assert confidence_B.min() > 0.9


def test_where_both_are_wrong_neither_is_trusted() -> None:
    rows = planted([500] * 200, [1] * 200, [4] * 200, [NEVER] * 200)
    _, confidence_B = drafted_ids(rows, lattice_fit.fit_weights(rows, 1))
    assert confidence_B.max() < 0.05


def test_how_long_a_match_must_be_is_learned() -> None:
    runs = [1 + i % 8 for i in range(400)]
    right = [7 if run >= 5 else 500 for run in runs]
    rows = planted([500] * 400, [7] * 400, runs, right)
    assert drafted_ids(rows, lattice_fit.fit_weights(rows, 1))[0] == right


def repeating(heads_right_from: int) -> Lattice:
    """Two tokens in turn, where heads say 50; they are right from that place on, else the text."""
    prompt, answer = torch.tensor([1, 2, 3, 1]), torch.tensor([2, 9] * 30)
    right_TP = lattice_fit.right_tokens(answer, 2)
    later_TP = right_TP[:, heads_right_from:]
    later_TP[later_TP >= 0] = 50
    head_ids_TKM, head_logp_TKM = torch.full((60, 2, 1), 50), torch.full((60, 2, 1), -1.0)
    return Lattice(head_ids_TKM, head_logp_TKM, *lattice_fit.text_matches(prompt, answer), right_TP)


def test_each_place_learns_from_its_own_tokens() -> None:
    rows = repeating(heads_right_from=1)
    drafted = lattice_fit.draft_rows(rows, lattice_fit.fit_weights(rows, 2))
    assert drafted.match_TP[3:-1, 0].all()
    assert drafted.from_context_TP[3:-1, 0].all()
    assert drafted.match_TP[:-2, 1].all()
    assert not drafted.from_context_TP[:-2, 1].any()
    # Past the answer's end nothing is right.
    assert not drafted.match_TP[-1].any()
    assert not drafted.match_TP[-2, 1]


def test_each_place_learns_from_the_text_before_it() -> None:
    """What stood behind the words at hand is wrong one place later, where other words are."""
    rows = repeating(heads_right_from=2)
    drafted = lattice_fit.draft_rows(rows, lattice_fit.fit_weights(rows, 2))
    for place in (0, 1):
        ends = -1 - place
        assert drafted.match_TP[3:ends, place].all()
        assert drafted.from_context_TP[3:ends, place].all()
        assert (drafted.confidence_TP[8:ends, place] > 0.8).all()


def test_weights_that_no_text_tells_about_stay_as_they_start() -> None:
    rows = planted([500] * 50, [7] * 50, [3] * 50, [7] * 50)
    [fitted_F] = lattice_fit.fit_weights(rows, 1)
    start_F = lattice_fit.initial_weights()
    never = [run for run in range(1, LONGEST_MATCH + 1) if run != 3]
    for first in (MATCH, NONE):
        assert torch.equal(
            fitted_F[[first + r for r in never]], start_F[[first + r for r in never]]
        )
        assert fitted_F[first + 3] != start_F[first + 3]
    nothing = planted([500], [7], [3], [-1])
    assert torch.equal(lattice_fit.fit_weights(nothing, 1)[0], start_F)


def sampled(rows: int, weights_F: Tensor, seed: int) -> Lattice:
    """Random rows whose right token is drawn with the probabilities that `weights_F` give."""
    generator = torch.Generator().manual_seed(seed)
    head_ids_TKM, head_logp_TKM = random_heads_say(rows, 1, 4, 8, seed)
    match_ids_TR = torch.randint(0, 8, (rows, 6), generator=generator)
    match_runs_TR = torch.randint(-1, 4, (rows, 6), generator=generator).clamp(min=0)
    match_runs_TR = match_runs_TR.sort(1, descending=True).values
    match_ids_TR = torch.where(match_runs_TR > 0, match_ids_TR, -1)
    unknown_TP = torch.zeros(rows, 1, dtype=torch.int64)
    made = Lattice(head_ids_TKM, head_logp_TKM, match_ids_TR, match_runs_TR, unknown_TP)
    candidates = made.at(torch.arange(rows), 0)
    probability_TS = lattice.scores(candidates, weights_F).softmax(1)
    slot_T1 = probability_TS.multinomial(1, generator=generator)
    tokens_TS = torch.nn.functional.pad(candidates.ids_BS, (0, 1), value=NEVER)
    made.right_TP.copy_(tokens_TS.gather(1, slot_T1))
    return made


def test_confidence_is_the_share_of_drafts_that_are_right() -> None:
    """On rows that were not fitted to, in tenths of confidence, within 0.06 (three deviations of
    the share in the smallest group that is looked at)."""
    true_F = lattice_fit.initial_weights()
    true_F[lattice.SCALE], true_F[lattice.FLOOR] = 0.8, -2.0
    true_F[lattice.COUNT], true_F[lattice.SHARE] = 0.5, 1.0
    true_F[MATCH : MATCH + 4] = torch.tensor([0.0, -1.0, 1.0, 3.0])
    true_F[NONE : NONE + 4] = torch.tensor([-1.0, 0.5, 0.0, -0.5])
    fitted_PF = lattice_fit.fit_weights(sampled(6000, true_F, seed=1), 1)
    fresh = sampled(12000, true_F, seed=2)
    drafted = lattice_fit.draft_rows(fresh, fitted_PF)
    confidence_T, right_T = drafted.confidence_TP[:, 0], drafted.match_TP[:, 0]
    tenth_T = (confidence_T * 10).long()
    looked_at = 0
    for tenth in range(10):
        inside_T = tenth_T == tenth
        if inside_T.sum() < 600:
            continue
        looked_at += 1
        share, said = float(right_T[inside_T].float().mean()), float(confidence_T[inside_T].mean())
        assert share == pytest.approx(said, abs=0.06), tenth
    assert looked_at >= 5
    # What it says of each row is what is true of it.
    everything = torch.arange(len(tenth_T))
    chosen_T = lattice.choose(fresh.at(everything, 0), true_F)[1]
    assert (chosen_T - confidence_T).abs().mean() < 0.03


@st.composite
def answers(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers; those of an answer repeat its prompt, or itself, or neither."""
    return [(draw(texts()), draw(texts())) for _ in range(draw(st.integers(1, 3)))]


def offline(
    ids: list[tuple[list[int], list[int]]], heads: int, places: int, seed: int
) -> tuple[Lattice, list[list[int]], list[list[int]]]:
    """Rows of whole answers, what each has said so far, and what the target says from there."""
    parts = [(torch.tensor(prompt), torch.tensor(answer)) for prompt, answer in ids]
    matches = [lattice_fit.text_matches(*part) for part in parts]
    said = [p + a[: i + 1] for p, a in ids for i in range(len(a))]
    to_come = [a[i + 1 :] for _, a in ids for i in range(len(a))]
    rows = Lattice(
        *random_heads_say(len(said), heads, 2, 3, seed),
        torch.cat([found for found, _ in matches]),
        torch.cat([runs for _, runs in matches]),
        torch.cat([lattice_fit.right_tokens(answer, places) for _, answer in parts]),
    )
    return rows, said, to_come


@settings(deadline=None, max_examples=40)
@given(answers(), st.integers(1, 3), st.integers(0, 3), seeds)
def test_offline_drafts_are_those_that_are_served(
    ids: list[tuple[list[int], list[int]]], heads: int, more: int, seed: int
) -> None:
    """Row by row up to a block's first wrong draft; what comes behind it is never accepted."""
    weights_PF = random_weights(heads + more, seed)
    rows, said, to_come = offline(ids, heads, heads + more, seed)
    drafted = lattice_fit.draft_rows(rows, weights_PF)
    width = max(map(len, said))
    window_BW = torch.tensor([[-1] * (width - len(text)) + text for text in said])
    assume(width > 1)
    block = lattice.draft_block(window_BW, rows.head_ids_TKM, rows.head_logp_TKM, weights_PF)
    for t, right in enumerate(to_come):
        for place, token in enumerate(block.ids_BP[t].tolist()):
            is_right = place < len(right) and right[place] == token
            assert bool(drafted.match_TP[t, place]) == is_right
            if place <= len(right):
                served = float(block.confidence_BP[t, place])
                assert float(drafted.confidence_TP[t, place]) == pytest.approx(served, abs=1e-5)
                origin = bool(block.from_context_BP[t, place])
                assert bool(drafted.from_context_TP[t, place]) == origin
            if not is_right:
                break


def test_many_rows_are_drafted_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, said, _ = offline([([0, 1, 2], [0, 1, 2] * 7), ([2], [1, 1, 0, 2])], 2, 4, seed=5)
    weights_PF = random_weights(4, seed=6)
    together = lattice_fit.draft_rows(rows, weights_PF)
    monkeypatch.setattr(lattice_fit, "_ROWS_AT_ONCE", 1)  # parts of 8 rows
    apart = lattice_fit.draft_rows(rows, weights_PF)
    assert together.match_TP.shape == (len(said), 4)
    assert together.match_TP[:, 0].any()
    assert torch.equal(apart.match_TP, together.match_TP)
    assert torch.equal(apart.from_context_TP, together.from_context_TP)
    torch.testing.assert_close(apart.confidence_TP, together.confidence_TP)


def test_drafts_are_kept_while_all_so_far_are_likely_enough() -> None:
    confidence_TP = torch.tensor([[0.5, 0.5, 1.0], [0.9, 0.0, 1.0], [0.1, 1.0, 1.0]])
    none_TP = torch.zeros(3, 3, dtype=torch.bool)
    drafted = Drafted(none_TP, confidence_TP, none_TP)
    yes, no = True, False
    assert drafted.kept(0.3).tolist() == [[yes, no, no], [yes, no, no], [no, no, no]]
    assert drafted.kept(0.2).tolist() == [[yes, yes, yes], [yes, no, no], [no, no, no]]
    # A place with no candidate ends the block, whatever the threshold.
    assert drafted.kept(0.0).tolist() == [[yes, yes, yes], [yes, no, no], [yes, yes, yes]]


@pytest.mark.parametrize("conditioning", ["none", "sampled_token"])
@pytest.mark.parametrize("draft_ids", [None, range(0, 97, 3), [4, 7, 50]], ids=["all", "33", "3"])
def test_examples_of_a_real_target(
    tiny_target: Path,
    tiny_answers: Path,
    tiny_records: list[Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    conditioning: str,
    draft_ids: list[int] | None,
) -> None:
    target = read_rows(str(tiny_target))
    draft_ids_V = None if draft_ids is None else torch.tensor(list(draft_ids))
    config = HeadsConfig(2, 16, target.fingerprint, conditioning=conditioning)  # type: ignore[arg-type]
    torch.manual_seed(0)
    heads = BlockwiseHeads(config)
    shards = read_texts(write_states(str(tiny_target), tiny_answers, tmp_path), 2)
    ids = [
        (torch.tensor(r.prompt_token_ids), torch.tensor(r.answer_token_ids)) for r in tiny_records
    ]
    rows_T = torch.arange(shards.rows)
    monkeypatch.setattr(lattice_fit, "_ROWS_AT_ONCE", 50)
    rows = lattice_fit.make_lattice(heads, shards, rows_T, target, draft_ids_V, 4)

    embedding_TD = target.embedding_VD.float()[shards.sampled_T]
    with torch.no_grad():
        states_TKD = heads(
            shards.gather(rows_T).float(), embedding_TD if conditioning != "none" else None
        )
        logp_TKV = (states_TKD @ target.lm_head_VD.float().T)[
            ..., slice(None) if draft_ids_V is None else draft_ids_V
        ].log_softmax(-1)
    count = min(CANDIDATES, logp_TKV.shape[-1])
    assert rows.head_ids_TKM.shape == rows.head_logp_TKM.shape == (shards.rows, 2, count)
    torch.testing.assert_close(
        rows.head_logp_TKM, logp_TKV.topk(count).values, rtol=1e-5, atol=1e-4
    )
    column_TKM = rows.head_ids_TKM
    if draft_ids_V is not None:
        column_TKM = torch.searchsorted(draft_ids_V, rows.head_ids_TKM)
        assert torch.equal(draft_ids_V[column_TKM], rows.head_ids_TKM)
    torch.testing.assert_close(
        logp_TKV.gather(-1, column_TKM), rows.head_logp_TKM, rtol=1e-5, atol=1e-4
    )
    # Texts lie one after the other, each with its own prompt.
    answer_of = torch.cat([lattice_fit.right_tokens(answer, 4) for _, answer in ids])
    assert torch.equal(rows.right_TP, answer_of)
    first = 0
    for prompt, answer in ids:
        behind = matches_of([*prompt.tolist(), *answer.tolist()])
        last = first + len(answer) - 1
        found = rows.match_ids_TR[last][rows.match_runs_TR[last] > 0].tolist()
        assert found == [token for token, _ in behind]
        first += len(answer)
    fitted_PF = lattice_fit.fit_weights(rows, 4)
    assert fitted_PF.shape == (4, lattice.NUM_WEIGHTS)
    assert fitted_PF.isfinite().all()
