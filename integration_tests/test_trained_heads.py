"""Heads from `bpd-train` in a real engine (0.32, V1): they accept what evaluation said they would.

Tiny targets, made on the spot; the engine's own greedy answers are what heads are trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads_training.cli import main as bpd_train
from heads_training.dataset import read_texts, split_rows
from integration_tests.harness.combos import COMBOS
from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.jobs import greedy, make_job, make_prompts, run, token_ids
from integration_tests.harness.releases import ReleaseError
from vllm_bpd.checkpoint import WEIGHTS_FILE, load_heads, save_heads
from vllm_bpd.heads import drafted_position

K = 4  # block size: three heads
TEXTS = 20  # overfitted on
MAX_TOKENS = 1 + 40 * K  # the prompt's own step gives one token, forty whole blocks the others
LONGER = K  # recorded behind MAX_TOKENS, so that the last block has labels, too
ENGINE = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512}
# 22 prompts, two of which this share holds out: a prompt's digest decides.
PROMPTS = make_prompts([3 + i % 9 for i in range(22)], 256, seed=14)
VALIDATION = 0.1


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine process of 0.32 on model runner V1."""
    try:
        process = EngineProcess(COMBOS[0], tmp_path_factory.mktemp("v1") / "engine.log")
    except ReleaseError as reason:
        pytest.skip(str(reason))
    yield process
    process.close()


def write_answers(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> Path:
    lines = [
        {
            "prompt_token_ids": prompt,
            "answer_token_ids": answer,
            "finish_reason": "length",
            "source": "random",
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def recorded(v1: EngineProcess, targets: dict[str, Path], tmp_path_factory: Any) -> Path:
    """The engine's own greedy answers to all prompts."""
    batch = greedy(PROMPTS, MAX_TOKENS + LONGER)
    reply = run(v1, make_job(targets["llama"], [batch], **ENGINE))
    path = tmp_path_factory.mktemp("recorded") / "answers.jsonl"
    return write_answers(path, PROMPTS, token_ids(reply["batches"][0]))


def trained(target: Path, answers: Path, folder: Path, steps: int, *more: str) -> Path:
    """Heads that `bpd-train` made in `steps` steps."""
    words = ["train", f"--target={target}", f"--answers={answers}", f"--work={folder / 'work'}"]
    words += [f"--output={folder / 'heads'}", f"--num-draft-heads={K - 1}", f"--steps={steps}"]
    words += ["--head-hidden-size=128", "--draft-vocab-size=0", "--batch-size=1024"]
    words += ["--learning-rate=8e-3", "--weight-decay=0", "--distillation=0", "--no-autocast"]
    words += [
        "--lattice-places=0",
        "--head-loss=mean",
        "--head-decay=1",
        f"--validation={VALIDATION}",
        f"--validate-every={steps}",
    ]
    assert bpd_train([*words, *more]) == 0
    return folder / "heads"


@pytest.fixture(scope="module")
def overfitted(targets: dict[str, Path], recorded: Path, tmp_path_factory: Any) -> Path:
    """Heads that know their texts by heart."""
    return trained(targets["llama"], recorded, tmp_path_factory.mktemp("overfitted"), 500)


def texts_trained_on(heads: Path) -> list[list[int]]:
    """The prompts of `PROMPTS` that were not held out."""
    (shard,) = (heads.parent / "work" / "states").glob("*.safetensors")
    texts = read_texts([shard], K - 1)
    records_R = texts.record_T[split_rows(texts, VALIDATION)[0]].unique()
    return [PROMPTS[i] for i in records_R[~texts.of_prompt_R[records_R]].tolist()]


def serve(
    engine: EngineProcess, target: Path, heads: Path, prompts: list[list[int]], **more: Any
) -> dict[str, Any]:
    """The reply's one batch: greedy answers of MAX_TOKENS by the target with `heads`."""
    # Heads with a lattice would else draft only what is likely on texts not trained on: nothing.
    speculative = {"method": "bpd", "model": str(heads), "min_confidence": 0.0}
    job = make_job(target, [greedy(prompts, MAX_TOKENS)], speculative_config=speculative, **ENGINE)
    batch: dict[str, Any] = run(engine, job | more)["batches"][0]
    return batch


def mean_accepted_block(batch: dict[str, Any]) -> float:
    return 1 + float(batch["spec"]["accepted"]) / float(batch["spec"]["drafts"])


def test_overfitted_heads_reach_k(
    v1: EngineProcess, targets: dict[str, Path], recorded: Path, overfitted: Path
) -> None:
    """The gate: within 0.2 of k on the texts they were trained on, and the same text."""
    prompts = texts_trained_on(overfitted)
    assert len(prompts) == TEXTS
    batch = serve(v1, targets["llama"], overfitted, prompts)
    answers = {
        tuple(record["prompt_token_ids"]): record["answer_token_ids"]
        for record in map(json.loads, recorded.read_text().splitlines())
    }
    assert token_ids(batch) == [answers[tuple(prompt)][:MAX_TOKENS] for prompt in prompts]
    assert mean_accepted_block(batch) > K - 0.2


@pytest.mark.parametrize("lattice_places", [0, 6])
def test_the_walk_foretells_the_engine(
    v1: EngineProcess,
    targets: dict[str, Path],
    recorded: Path,
    tmp_path: Path,
    lattice_places: int,
) -> None:
    """Half-trained heads, so that blocks of every length occur: within 2% on the same texts."""
    lattice = f"--lattice-places={lattice_places}"
    heads = trained(targets["llama"], recorded, tmp_path, 120, lattice)
    batch = serve(v1, targets["llama"], heads, PROMPTS)
    on = write_answers(tmp_path / "served.jsonl", PROMPTS, token_ids(batch))
    report = tmp_path / "report.json"
    words = ["evaluate", f"--target={targets['llama']}", f"--heads={heads}", f"--on={on}"]
    assert bpd_train([*words, f"--work={tmp_path / 'work'}", f"--json={report}"]) == 0
    found = json.loads(report.read_text())
    if lattice_places:  # the request's own text helps
        found = found["with_own_text"]["min_confidence 0.0"]
    most = lattice_places + 1 if lattice_places else K
    foretold = found["by_k"][str(most)]["k_hat"]
    served = mean_accepted_block(batch)
    assert 1.3 < served < most - 0.5  # neither useless nor perfect, which would agree anyway
    assert foretold == pytest.approx(served, rel=0.02)


@pytest.mark.parametrize("draft_vocab_size", [0, 200])
def test_export_serve_export_is_the_identity(
    v1: EngineProcess,
    targets: dict[str, Path],
    recorded: Path,
    tmp_path: Path,
    draft_vocab_size: int,
) -> None:
    """Heads taken out of the engine are those that were put in, byte for byte."""
    more = [f"--draft-vocab-size={draft_vocab_size}", f"--lattice-places={draft_vocab_size and 8}"]
    heads = trained(targets["llama"], recorded, tmp_path, 5, *more)
    out = tmp_path / "out"
    serve(v1, targets["llama"], heads, PROMPTS[:1], save_heads=str(out))
    before, after = load_file(heads / WEIGHTS_FILE), load_file(out / WEIGHTS_FILE)
    assert before.keys() == after.keys()
    assert len(before) == (4 if draft_vocab_size else 2)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert tensor.view(torch.uint8).equal(after[name].view(torch.uint8)), name
    assert (heads / "config.json").read_bytes() == (out / "config.json").read_bytes()


COUNT = 64  # ids of the counting target, and its hidden size


@pytest.fixture(scope="module")
def counting_target(tmp_path_factory: Any) -> Path:
    """A Llama that counts: behind id i it says i + 1, and 0 behind the last.

    So an id is its token's position (from a fixed start), and what a head drafts shows how far
    ahead it looks. Attention and MLP add nothing; the state is the unit vector of the last id.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=COUNT,
        hidden_size=COUNT,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(COUNT))
        model.lm_head.weight.copy_(torch.eye(COUNT).roll(1, 0))
    folder: Path = tmp_path_factory.mktemp("counting")
    model.save_pretrained(folder)
    return folder


def test_each_head_drafts_its_own_offset(
    v1: EngineProcess, counting_target: Path, tmp_path: Path
) -> None:
    """From text to served drafts: head i is right i + 2 tokens ahead, and nowhere else."""
    starts = [[start] for start in range(0, COUNT, 3)]
    said = [[(start + i) % COUNT for i in range(1, 70)] for (start,) in starts]
    answers = write_answers(tmp_path / "answers.jsonl", starts, said)
    heads = trained(counting_target, answers, tmp_path, 300, "--conditioning=none")
    plain, _ = load_heads(heads)
    position = 20  # where the id is 20
    states_KD = plain(torch.eye(COUNT)[position].unsqueeze(0) * COUNT**0.5)[0]
    drafts = (states_KD @ torch.eye(COUNT).roll(1, 0).T).argmax(-1).tolist()
    assert drafts == [drafted_position(position, head) for head in range(K - 1)]

    batch = serve(v1, counting_target, heads, starts)
    assert token_ids(batch) == [
        [(s + i) % COUNT for i in range(1, MAX_TOKENS + 1)] for (s,) in starts
    ]
    spec = batch["spec"]
    assert spec["per_position"] == [spec["drafts"]] * (K - 1)

    # The same heads in another order are right nowhere.
    with torch.no_grad():
        rows = plain.output_layer.weight.view(K - 1, COUNT, -1)  # type: ignore[operator]
        rows.copy_(rows.roll(1, 0).clone())
    save_heads(tmp_path / "rolled", plain)
    assert serve(v1, counting_target, tmp_path / "rolled", starts[:4])["spec"]["accepted"] == 0
