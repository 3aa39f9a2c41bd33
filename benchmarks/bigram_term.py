"""What a low-rank bigram term adds to heads that do not see each other's drafts, offline.

A candidate x behind the token y gets `before[y] . after[x]` on top of its head's log probability:
two matrices of `--rank` columns over the scored ids. They are trained on the heads' own candidates
for the training answers, so that no product with the vocabulary is repeated; the heads stay as
they are. Then the lattice is fitted anew, with and without the term, and both are walked.

Shape suffixes as in `heads_training.lattice_fit`; C columns of the term.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.drafters import Variant, measure, variants, write_figures
from benchmarks.trials import JUDGED
from heads_training.dataset import Texts, read_texts, split_held_out, split_rows
from heads_training.hidden_states import write_states
from heads_training.lattice_fit import (
    Lattice,
    fit_weights,
    head_candidates,
    make_lattice,
    right_tokens,
)
from heads_training.target import read_rows
from vllm_bpd.arguments import at_least_one, output_file, run_command
from vllm_bpd.checkpoint import load_heads

_VALIDATION = 0.05  # share of the training prompts that nothing but the lattice is fitted to
_BATCH = 8192  # rows a step


class BigramTerm(nn.Module):
    """The term, zero for ids that the heads do not score."""

    def __init__(self, ids_V: Tensor, vocab_size: int, rank: int) -> None:
        """`ids_V` int64: the scored ids."""
        super().__init__()
        row_W = torch.full((vocab_size,), len(ids_V))
        row_W[ids_V] = torch.arange(len(ids_V))
        self.row_W: Tensor
        self.register_buffer("row_W", row_W)
        # The last row is that of all other ids.
        self.before = nn.Embedding(len(ids_V) + 1, rank)
        self.after = nn.Embedding(len(ids_V) + 1, rank)
        nn.init.normal_(self.before.weight, std=rank**-0.5)
        nn.init.zeros_(self.after.weight)

    def forward(self, before_B: Tensor, ids_BM: Tensor) -> Tensor:
        """float32 [B, M], of ids int64; -1 is no id."""
        before_BC = self.before(self.row_W[before_B])
        after_BMC = self.after(self.row_W[ids_BM])
        term_BM: Tensor = (after_BMC @ before_BC.unsqueeze(2)).squeeze(2)
        return term_BM


@dataclass(frozen=True)
class Rows:
    """The heads' candidates at some rows, the tokens before each place, and the right ones."""

    ids_TKM: Tensor
    logp_TKM: Tensor
    before_TK: Tensor  # the target's token in front of the one that a head drafts
    right_TK: Tensor  # -1: past the answer's end


def main() -> None:
    """Train, fit, walk, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bigram_term",
        description=__doc__.partition("\n\nShape")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="model folder")
    parser.add_argument("--heads", required=True, type=Path, help="folder of heads")
    parser.add_argument("--answers", required=True, type=Path, help="training answers")
    parser.add_argument("--judge", required=True, type=Path, help="answers to judge on")
    parser.add_argument("--rank", type=at_least_one, default=64, help="columns of the term")
    parser.add_argument(
        "--epochs", type=at_least_one, default=4, help="passes over the training rows"
    )
    parser.add_argument(
        "--places", type=at_least_one, default=8, help="of the lattice, k - 1 at most"
    )
    parser.add_argument("--work", type=Path, default=Path("bpd-work"), help="for hidden states")
    parser.add_argument("--output", type=output_file, help="JSON file")
    arguments = parser.parse_args()
    found = run(arguments)
    for name, figures in found["drafters"].items():
        by_k = (f"{k}: {row['tokens_per_step']:.3f}" for k, row in figures["all"].items())
        print(f"{name}: {', '.join(by_k)}")
    if arguments.output:
        write_figures(arguments.output, "python -m benchmarks.bigram_term", found, arguments)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of every drafter, with the term and without."""
    heads, draft_ids_V = load_heads(arguments.heads, torch.bfloat16)
    target = read_rows(arguments.target)
    vocab_size = target.fingerprint.vocab_size
    ids_V = torch.arange(vocab_size) if draft_ids_V is None else draft_ids_V.long()

    def texts_of(answers: Path, name: str) -> Texts:
        shards = write_states(arguments.target, answers, arguments.work / name)
        return read_texts(shards, heads.num_heads)

    trained = texts_of(arguments.answers, "states")
    train_T = split_rows(trained, _VALIDATION)[0]
    candidates = head_candidates(heads, trained, train_T, target, draft_ids_V)
    term = BigramTerm(ids_V, vocab_size, arguments.rank)
    fit_term(term, rows_of(trained, train_T, *candidates), arguments.epochs)

    judged = texts_of(arguments.judge, "judged")
    fit_T, judge_T = split_held_out(trained, _VALIDATION)[0], torch.arange(judged.rows)
    sides = [
        (texts, rows_T, make_lattice(heads, texts, rows_T, target, draft_ids_V, arguments.places))
        for texts, rows_T in ((trained, fit_T), (judged, judge_T))
    ]
    found: dict[str, Variant] = {}
    for name, used in (("", None), (" with the term", term)):
        fitted, walked = (with_term(used, *side) for side in sides)
        made = variants(walked, fit_weights(fitted, arguments.places))
        found |= {drafter + name: made[drafter] for drafter in JUDGED}
    weights = sum(parameter.numel() for parameter in term.parameters())
    return {"rank": arguments.rank, "weights of the term": weights, **measure(found, judged)}


def rows_of(texts: Texts, rows_T: Tensor, ids_TKM: Tensor, logp_TKM: Tensor) -> Rows:
    """Rows of whole answers with their candidates, and what stands before and at each place."""
    heads, before, right = ids_TKM.shape[1], [], []
    for record in texts.record_T[rows_T].unique_consecutive().tolist():
        length = int(texts.answer_lengths_R[record])
        answer_ids = texts.ids[record][-length:].long()
        right_NK = right_tokens(answer_ids, heads)
        right.append(right_NK)
        before.append(torch.cat([answer_ids.unsqueeze(1), right_NK[:, :-1]], 1))
    return Rows(ids_TKM, logp_TKM, torch.cat(before), torch.cat(right))


def fit_term(term: BigramTerm, rows: Rows, epochs: int, seed: int = 0) -> None:
    """Maximum likelihood of the right token among its head's candidates, where it is one."""
    named_TKM = rows.ids_TKM == rows.right_TK.unsqueeze(2)
    places = named_TKM.any(2).nonzero()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(term.parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(places), generator=generator).split(_BATCH):
            row_B, head_B = places[batch].unbind(1)
            scores_BM = rows.logp_TKM[row_B, head_B] + term(
                rows.before_TK[row_B, head_B], rows.ids_TKM[row_B, head_B]
            )
            right_B = named_TKM[row_B, head_B].int().argmax(1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores_BM, right_B).backward()
            optimizer.step()


@torch.inference_mode()
def with_term(term: BigramTerm | None, texts: Texts, rows_T: Tensor, lattice: Lattice) -> Lattice:
    """The candidates under the term, best first; teacher-forced, as the lattice is everywhere."""
    if term is None:
        return lattice
    rows = rows_of(texts, rows_T, lattice.head_ids_TKM, lattice.head_logp_TKM)
    heads = rows.ids_TKM.shape[1]
    adjusted = [
        rows.logp_TKM[:, i] + term(rows.before_TK[:, i], rows.ids_TKM[:, i]) for i in range(heads)
    ]
    logp_TKM, order_TKM = torch.stack(adjusted, 1).sort(dim=2, descending=True)
    return replace(lattice, head_ids_TKM=rows.ids_TKM.gather(2, order_TKM), head_logp_TKM=logp_TKM)


if __name__ == "__main__":
    run_command(main)
