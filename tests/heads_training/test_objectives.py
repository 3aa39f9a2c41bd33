"""Losses are those of plain formulas, and memory is that of a chunk, counted tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.training_memory import CountedMemory
from heads_training.batches import P1
from heads_training.finetune import make_objective
from heads_training.objectives import FrozenObjective
from heads_training.target import TargetRows
from heads_training.train import TrainingData, make_steps, new_heads
from tests.heads_training.made_data import TINY
from vllm_bpd.config import HeadsConfig, TargetFingerprint
from vllm_bpd.errors import HeadsError
from vllm_bpd.heads import BlockwiseHeads

ROWS, VOCAB, WIDTH, CHUNK = 4096, 8192, 4, 64
HARD = replace(TINY, distillation=0.0, mode="finetune", tuned_target=Path("t"))


def random_heads(heads: int) -> BlockwiseHeads:
    fingerprint = TargetFingerprint("Made", 1, WIDTH, VOCAB)
    made = BlockwiseHeads(HeadsConfig(heads, 8, fingerprint, conditioning="none"))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made


@pytest.mark.parametrize(("dtype", "chunks"), [(torch.float32, 2), (torch.bfloat16, 2.5)])
def test_memory_at_4096_tokens_is_that_of_chunks(dtype: torch.dtype, chunks: float) -> None:
    """docs/training.md states it. The logits of all rows would be 64 chunks, and counted twice."""
    heads, lm_head_VD = 3, torch.randn(VOCAB, WIDTH, dtype=dtype)
    embedding_WD = torch.zeros(VOCAB, WIDTH, dtype=dtype)
    objective = FrozenObjective(random_heads(heads).to(dtype), embedding_WD, lm_head_VD, CHUNK)
    ids_RS, weights_RS = torch.randint(0, VOCAB, (ROWS, 3)), torch.rand(ROWS, 3)
    targets = dict.fromkeys(range(heads), (ids_RS, weights_RS))
    hidden_RD = torch.randn(ROWS, WIDTH)
    with CountedMemory() as memory:
        objective(hidden_RD, ids_RS[:, 0], targets)["loss"].backward()
    chunk_of_logits = CHUNK * VOCAB * 4  # bytes, in float32
    assert memory.largest == chunk_of_logits
    by_width = ROWS * 4 * (4 * heads * WIDTH + 4 * 8 * heads)  # states, joint layer, gradients
    assert chunks * chunk_of_logits < memory.peak < (chunks + 0.1) * chunk_of_logits + by_width


def test_the_counter_sees_whole_logits() -> None:
    states_RD = torch.randn(ROWS, WIDTH).requires_grad_()
    with CountedMemory() as memory:
        loss = torch.nn.functional.cross_entropy(
            states_RD @ torch.randn(VOCAB, WIDTH).T, torch.zeros(ROWS, dtype=torch.int64)
        )
        loss.backward()
    assert memory.largest == ROWS * VOCAB * 4
    assert memory.peak >= 2 * ROWS * VOCAB * 4


def plain_losses(
    base: Any, heads: BlockwiseHeads, data: TrainingData, records: list[int]
) -> Tensor:
    """Mean cross-entropy of p1 and of each head over answer tokens, from whole logits."""
    sums = torch.zeros(1 + heads.num_heads)
    counts = torch.zeros(1 + heads.num_heads)
    for record in records:
        ids = data.texts.ids[record].long()
        first = len(ids) - int(data.texts.answer_lengths_R[record]) - 1
        hidden_LD = base.model(input_ids=ids[:-1].unsqueeze(0)).last_hidden_state[0, first:]
        embedded_LD = base.model.embed_tokens.weight[ids[first + 1 :]]
        states = [hidden_LD, *heads(hidden_LD, embedded_LD).unbind(1)]
        for i, states_LD in enumerate(states):
            labels = ids[first + 1 + i :]
            logits_LV = states_LD[: len(labels)] @ base.lm_head.weight.T
            if i:  # heads score the draft vocabulary
                assert data.draft_ids_V is not None
                inside = torch.isin(labels, data.draft_ids_V)
                logits_LV = logits_LV[:, data.draft_ids_V][inside]
                labels = torch.searchsorted(data.draft_ids_V, labels[inside])
            sums[i] += torch.nn.functional.cross_entropy(logits_LV, labels, reduction="sum")
            counts[i] += len(labels)
    return sums / counts


def test_finetune_is_the_plain_loss_on_answer_tokens(
    tiny_data: TrainingData, tiny_target: Path
) -> None:
    data = replace(tiny_data, soft=None)
    heads = new_heads(HARD, data)
    torch.nn.init.normal_(heads.output_layer.weight, std=0.05)  # type: ignore[arg-type]
    objective = make_objective(HARD, data, heads)
    steps = make_steps(HARD, data)
    found = objective(**steps[0])["loss"]
    found.backward()
    got = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    objective.zero_grad()
    expected = plain_losses(objective.base, heads, data, steps.order.batch(0).tolist()).mean()
    expected.backward()
    torch.testing.assert_close(found, expected)
    assert got.keys() == dict(objective.named_parameters()).keys()
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_p1_alone_moves_no_head(tiny_data: TrainingData) -> None:
    data = replace(tiny_data, soft=None)
    objective = make_objective(HARD, data, new_heads(HARD, data))
    item = make_steps(HARD, data)[0]
    objective(**{**item, "targets": {P1: item["targets"][P1]}})["loss"].backward()
    assert all(p.grad is None for p in objective.heads.parameters())
    assert all(p.grad is not None for p in objective.base.parameters())


def test_gradient_checkpointing_changes_nothing(tiny_data: TrainingData) -> None:
    losses = []
    for checkpointing in (False, True):
        config = replace(HARD, gradient_checkpointing=checkpointing)
        objective = make_objective(config, tiny_data, new_heads(config, tiny_data)).train()
        loss = objective(**make_steps(config, tiny_data)[0])["loss"]
        loss.backward()
        losses.append((loss, objective.base.model.embed_tokens.weight.grad))
    torch.testing.assert_close(losses[0], losses[1])


def test_only_a_folder_can_be_finetuned(tiny_data: TrainingData) -> None:
    target = tiny_data.target
    rows = TargetRows(target.fingerprint, target.embedding_VD, target.lm_head_VD)
    with pytest.raises(HeadsError, match="finetune starts from a checkpoint"):
        make_objective(HARD, replace(tiny_data, target=rows), new_heads(HARD, tiny_data))
