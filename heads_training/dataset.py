"""Training examples: hidden state, token just sampled and the tokens each head should draft.

Shape suffixes: R records, N their tokens, T rows (answer tokens), K heads, V draft vocabulary,
W whole vocabulary, B rows of a batch, D hidden size.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heads_training.degenerate import is_loop
from heads_training.hidden_states import Shard, read_shard
from vllm_bpd.errors import HeadsError
from vllm_bpd.heads import drafted_position, sampled_position

IGNORED = -100  # label of what no head can draft: past the answer's end, outside the vocabulary


@dataclass(frozen=True)
class Texts:
    """All answers of some shards, and their rows of hidden states where they lie."""

    hidden_TD: list[Tensor]  # one mapped tensor a shard, bf16
    sampled_T: Tensor  # int64, the token the target sampled from each row
    next_TK: Tensor  # int64, the tokens that each head should draft; IGNORED past the end
    record_T: Tensor  # int64, each row's record
    prompts: list[bytes]  # one digest a record, of the ids that its conversation began with
    sources: list[str]  # one a record
    loops: list[bool]  # one a record: cut off at its longest while repeating itself
    ids: list[Tensor]  # int32, one a record: its prompt and its answer
    answer_lengths_R: Tensor  # int64, tokens, each record's rows
    of_prompt_R: Tensor  # bool: the record is another's prompt, to train on and for nothing else

    @property
    def rows(self) -> int:
        """How many rows, that is answer tokens, and tokens of prompts that were read, T."""
        return self.sampled_T.shape[0]

    @property
    def answers(self) -> int:
        """How many answers."""
        return int((~self.of_prompt_R).sum())

    @functools.cached_property
    def answer_rows(self) -> Tensor:
        """int64: the rows under answers."""
        return (~self.of_prompt_R[self.record_T]).nonzero().flatten()

    @functools.cached_property
    def first_rows(self) -> Tensor:
        """int64 [R]: each record's first row; its others follow."""
        return self.answer_lengths_R.cumsum(0) - self.answer_lengths_R

    def digest(self) -> str:
        """sha256 (hex) over every answer with its prompt, and where it begins."""
        sha = hashlib.sha256(self.answer_lengths_R[~self.of_prompt_R].numpy().tobytes())
        for ids, of_prompt in zip(self.ids, self.of_prompt_R.tolist(), strict=True):
            if not of_prompt:
                sha.update(ids.numpy().tobytes())
        return sha.hexdigest()

    def gather(self, rows_B: Tensor) -> Tensor:
        """[B, D] bf16: the hidden states of `rows_B`, in its order."""
        hidden_BD = torch.empty(len(rows_B), self.hidden_TD[0].shape[1], dtype=torch.bfloat16)
        first = 0
        for hidden_TD in self.hidden_TD:
            inside_B = (rows_B >= first) & (rows_B < first + hidden_TD.shape[0])
            hidden_BD[inside_B] = hidden_TD[rows_B[inside_B] - first]
            first += hidden_TD.shape[0]
        return hidden_BD


def read_texts(shards: Sequence[Path | Shard], num_heads: int) -> Texts:
    """Map shards, or take them as they are, and make every head's labels.

    Raises HeadsError for none or damaged ones.
    """
    if not shards:
        raise HeadsError(
            "states: found no shard; expected at least one, as `bpd-train train` makes"
        )
    hidden, sampled, following, records = [], [], [], []
    prompts: list[list[int]] = []
    sources: list[str] = []
    loops: list[bool] = []
    ids: list[Tensor] = []
    of_prompt = []
    for given in shards:
        shard = given if isinstance(given, Shard) else read_shard(given)
        hidden.append(shard.hidden_TD)
        of_prompt.append(shard.of_prompt_R)
        for record, (prompt_ids, answer_ids) in enumerate(_split_ids(shard)):
            own_T, next_TK = label_text(prompt_ids, answer_ids, num_heads)
            sampled.append(own_T)
            following.append(next_TK)
            records.append(torch.full_like(own_T, len(prompts)))
            ids.append(torch.cat([prompt_ids, answer_ids]).int())
            # Of a prompt that is a text itself, all is prompt.
            prompts.append((ids[-1] if shard.of_prompt_R[record] else prompt_ids).tolist())
            cut = shard.finish_reasons[record] == "length"
            loops.append(cut and is_loop(answer_ids.tolist()))
        sources += shard.sources
    return Texts(
        hidden,
        torch.cat(sampled),
        torch.cat(following),
        torch.cat(records),
        beginnings(prompts),
        sources,
        loops,
        ids,
        torch.tensor([len(own_T) for own_T in sampled]),
        torch.cat(of_prompt),
    )


def beginnings(prompts: list[list[int]]) -> list[bytes]:
    """For each prompt, a digest of the shortest one that it begins with, which may be itself.

    A later turn's prompt holds the turns before it, answers included: one may not be trained on
    while the other is held out.
    """
    digests = [b""] * len(prompts)
    shortest: list[int] = []
    digest = b""
    # In this order, all that begin with a prompt follow it.
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
        if not shortest or prompts[i][: len(shortest)] != shortest:
            shortest = prompts[i]
            digest = hashlib.sha256(torch.tensor(shortest).int().numpy().tobytes()).digest()
        digests[i] = digest
    return digests


def _split_ids(shard: Shard) -> list[tuple[Tensor, Tensor]]:
    """(prompt ids, answer ids) of each record, int64."""
    lengths = torch.stack([shard.prompt_lengths_R, shard.answer_lengths_R], 1).flatten().tolist()
    parts = shard.token_ids_N.long().split(lengths)
    return list(zip(parts[::2], parts[1::2], strict=True))


def label_text(prompt_ids: Tensor, answer_ids: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """What the target sampled from, and each head should draft at, every row of one text.

    Takes int64 ids [P] and [A]; returns int64 [A] and [A, K], rows t = P-1 .. P+A-2.
    """
    ids = torch.cat([prompt_ids, answer_ids, answer_ids.new_full((num_heads,), IGNORED)])
    first, rows = len(prompt_ids) - 1, len(answer_ids)
    start = sampled_position(first)
    sampled_T = ids[start : start + rows]
    starts = [drafted_position(first, head) for head in range(num_heads)]
    return sampled_T, torch.stack([ids[s : s + rows] for s in starts], dim=1)


def split_rows(texts: Texts, validation: float) -> tuple[Tensor, Tensor]:
    """Row numbers (int64) of the training and the validation split, by conversation.

    A prompt's digest decides, so equal prompts fall on one side, today and with more data, and
    later turns where their first one does. Rows under prompts are trained on, or left out where the
    answer is held out.
    """
    held_out = [int.from_bytes(p[:8], "big") < validation * 2**64 for p in texts.prompts]
    held_out_R = torch.tensor(held_out)
    validation_T = (held_out_R & ~texts.of_prompt_R)[texts.record_T]
    return (~held_out_R[texts.record_T]).nonzero().flatten(), validation_T.nonzero().flatten()


def split_held_out(texts: Texts, validation: float) -> tuple[Tensor, Tensor]:
    """Held-out rows (int64) to calibrate the lattice on, and those to report figures on.

    Half and half by prompt; where one half would be empty, both are all of them.
    """
    held_out_T = split_rows(texts, validation)[1]
    first_T = split_rows(texts, validation / 2)[1]
    second_T = held_out_T[~torch.isin(held_out_T, first_T)]
    if not len(first_T) or not len(second_T):
        return held_out_T, held_out_T
    return first_T, second_T


def draft_vocabulary(sampled_T: Tensor, size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent ids of `sampled_T`, int64 [V], ascending; ties: lowest id first.

    Where fewer are seen at all, the lowest unseen ids fill up: tokenizers number common pieces
    first.
    """
    counts_W = torch.bincount(sampled_T, minlength=vocab_size)
    order = torch.sort(counts_W, descending=True, stable=True).indices
    return order[:size].sort().values


def to_draft_ids(next_TK: Tensor, draft_ids_V: Tensor | None, vocab_size: int) -> Tensor:
    """Labels as rows of the draft vocabulary; IGNORED where a token has none. int64 [T, K]."""
    if draft_ids_V is None:
        return next_TK
    index_W = torch.full((vocab_size,), IGNORED)
    index_W[draft_ids_V] = torch.arange(len(draft_ids_V))
    return torch.where(next_TK >= 0, index_W[next_TK.clamp(min=0)], IGNORED)


def coverage(sampled_T: Tensor, draft_ids_V: Tensor) -> float:
    """Share of tokens, 0..1, that the draft vocabulary holds."""
    return float(torch.isin(sampled_T, draft_ids_V).float().mean())


def describe(texts: Texts) -> dict[str, object]:
    """Counts for provenance: records, answer tokens, loops, answer tokens by source."""
    tokens: Counter[str] = Counter()
    for record in (~texts.of_prompt_R).nonzero().flatten().tolist():
        tokens[texts.sources[record]] += int(texts.answer_lengths_R[record])
    return {
        "records": texts.answers,
        "answer_tokens": len(texts.answer_rows),
        "prompt_tokens": texts.rows - len(texts.answer_rows),
        "loops": sum(texts.loops),
        "answer_tokens_by_source": dict(tokens.most_common()),
    }
