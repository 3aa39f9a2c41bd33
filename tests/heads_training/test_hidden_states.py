"""Hidden states are the target's own, for any batch; shards are remade only when they must be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heads_training import hidden_states
from heads_training.records import Record, write_records
from heads_training.target import check_last_hidden_state, last_hidden_state, load_model
from vllm_bpd.errors import HeadsError


def test_states_give_the_greedy_answer(tiny_target: Path, tiny_records: list[Record]) -> None:
    model = load_model(str(tiny_target))
    states_TD = hidden_states.hidden_states(model, tiny_records)
    tokens = [i for record in tiny_records for i in record.answer_token_ids]
    ranked_T = model.get_output_embeddings()(states_TD).argmax(-1)
    # bf16 sums differ between one row and many, so a near tie may fall the other way.
    assert (ranked_T == torch.tensor(tokens)).float().mean() > 0.97


def test_a_batch_equals_its_singles(tiny_target: Path, tiny_records: list[Record]) -> None:
    model = load_model(str(tiny_target), torch.float32)
    together_TD = hidden_states.hidden_states(model, tiny_records)
    singly_TD = torch.cat([hidden_states.hidden_states(model, [r]) for r in tiny_records])
    # Stored in bf16: two float32 results may round to neighbours.
    torch.testing.assert_close(together_TD, singly_TD, rtol=1e-2, atol=1e-2)


def test_shards_are_kept_and_remade(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path, tiny_records: list[Record]
) -> None:
    answers, states = tmp_path / "answers", tmp_path / "states"
    answers.mkdir()
    for path in tiny_answers.iterdir():
        (answers / path.name).write_bytes(path.read_bytes())
    shards = hidden_states.write_states(str(tiny_target), answers, states)
    times = [path.stat().st_mtime_ns for path in shards]
    assert hidden_states.write_states(str(tiny_target), answers, states) == shards
    assert [path.stat().st_mtime_ns for path in shards] == times
    (answers / "answers-00001.jsonl").write_text(json.dumps(tiny_records[0].__dict__) + "\n")
    shards[0].write_bytes(shards[0].read_bytes()[:100])  # cut off
    hidden_states.write_states(str(tiny_target), answers, states)
    assert len(hidden_states.read_shard(shards[0]).sources) == 7
    shard = hidden_states.read_shard(shards[1])
    assert shard.sources == ["even"]
    assert shard.hidden_TD.shape == (len(tiny_records[0].answer_token_ids), 64)
    assert shard.token_ids_N.tolist() == (
        tiny_records[0].prompt_token_ids + tiny_records[0].answer_token_ids
    )


def test_states_that_are_never_on_disk_are_the_same(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path
) -> None:
    shards = hidden_states.write_states(str(tiny_target), tiny_answers, tmp_path)
    before = sorted(tiny_answers.iterdir())
    online = list(hidden_states.iterate_states(str(tiny_target), tiny_answers))
    assert sorted(tiny_answers.iterdir()) == before
    assert len(online) == len(shards) == 2
    for ours, path in zip(online, shards, strict=True):
        stored = hidden_states.read_shard(path)
        assert torch.equal(ours.hidden_TD, stored.hidden_TD)
        assert torch.equal(ours.token_ids_N, stored.token_ids_N)
        assert torch.equal(ours.prompt_lengths_R, stored.prompt_lengths_R)
        assert torch.equal(ours.answer_lengths_R, stored.answer_lengths_R)
        assert (ours.sources, ours.finish_reasons) == (stored.sources, stored.finish_reasons)


def test_prompts_are_texts_behind_the_answers(
    tiny_target: Path, tiny_records: list[Record], tmp_path: Path
) -> None:
    head = [3, 5]  # as of a chat template
    records = [replace(r, prompt_token_ids=head + r.prompt_token_ids) for r in tiny_records[:3]]
    write_records(tmp_path / "answers.jsonl", records)
    (answers,) = hidden_states.iterate_states(str(tiny_target), tmp_path / "answers.jsonl")
    (both,) = hidden_states.iterate_states(str(tiny_target), tmp_path / "answers.jsonl", True)
    assert both.of_prompt_R.tolist() == [False] * 3 + [True] * 3
    assert torch.equal(both.hidden_TD[: len(answers.hidden_TD)], answers.hidden_TD)
    assert both.prompt_lengths_R[3:].tolist() == [2, 2, 2]
    assert both.sources[3:] == answers.sources
    assert both.finish_reasons[3:] == ["given"] * 3
    prompts = [record.prompt_token_ids for record in records]
    assert both.answer_lengths_R[3:].tolist() == [len(ids) - 2 for ids in prompts]
    read_N = both.token_ids_N[len(answers.token_ids_N) :].tolist()
    assert read_N == [i for ids in prompts for i in ids]
    # From the state under the head's last token, the first one behind the head follows.
    model = load_model(str(tiny_target))
    alone = [last_hidden_state(model, torch.tensor([ids]))[0, 1:-1] for ids in prompts]
    torch.testing.assert_close(
        both.hidden_TD[len(answers.hidden_TD) :], torch.cat(alone), rtol=0.05, atol=0.05
    )


def test_prompts_without_a_second_token_behind_the_head() -> None:
    same = Record([1, 2, 3], [4], "stop", "a")
    assert hidden_states.prompt_texts([same, same]) == {}  # the head is all there is
    others = [same, replace(same, prompt_token_ids=[1, 2, 5, 6])]
    assert list(hidden_states.prompt_texts(others)) == [1]
    assert hidden_states.prompt_texts([replace(same, prompt_token_ids=[1])]) == {}


def test_a_shard_with_prompts_serves_where_none_are_asked_for(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path
) -> None:
    def make(prompts: bool) -> list[int]:
        shards = hidden_states.write_states(str(tiny_target), tiny_answers, tmp_path, prompts)
        return [path.stat().st_mtime_ns for path in shards]

    without, with_prompts = make(False), make(True)
    assert not set(without) & set(with_prompts)
    assert make(False) == with_prompts


def test_states_of_a_fine_tuned_target_are_made_anew(
    tiny_target: Path, tiny_answers: Path, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    (shard, _) = hidden_states.write_states(str(tiny_target), tiny_answers, tmp_path)
    before = hidden_states.read_shard(shard).hidden_TD.clone()
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    with torch.no_grad():  # the LM head, all that the fingerprint hashes, stays as it is
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    model.save_pretrained(tmp_path / "tuned")
    hidden_states.write_states(str(tmp_path / "tuned"), tiny_answers, tmp_path)
    assert not torch.equal(hidden_states.read_shard(shard).hidden_TD, before)


def test_answers_of_another_target(tiny_target: Path, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt_token_ids": [1], "answer_token_ids": [5000]}\n')
    with pytest.raises(HeadsError, match="5000"):
        hidden_states.write_states(str(tiny_target), path, tmp_path / "states")


def test_a_norm_outside_the_base_model_is_refused(tiny_target: Path) -> None:
    model = load_model(str(tiny_target), torch.float32)
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: own(hidden.flip(-1) if hidden.dim() == 3 else hidden)
    with pytest.raises(HeadsError, match="last hidden state"):
        check_last_hidden_state(model)
