"""Heads are trained on what the server gives them: the same states, and the target's own answers.

Shape suffixes: T rows, that is answer tokens, D hidden size.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from heads_training.generate import GenerateConfig, generate
from heads_training.hidden_states import hidden_states
from heads_training.parallel import to_options
from heads_training.records import Record, answer_files, read_records
from heads_training.target import last_hidden_state, load_model
from integration_tests.harness import captures
from integration_tests.harness.combos import COMBOS
from integration_tests.harness.engine_process import (
    JOB_TIMEOUT,
    REPOSITORY,
    EngineProcess,
    engine_environment,
)
from integration_tests.harness.heads import write_heads
from integration_tests.harness.jobs import greedy, make_job, make_prompts, run, token_ids
from tests.heads_training.tiny_chat import write_chat_target

PROMPTS = make_prompts((1, 2, 7, 16, 33), 128)
MAX_TOKENS = 12
ENGINE = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256}
# Longest difference, relative to the state's own length: float32 sums in another order; bfloat16
# rounds after every layer, to 8 bits, which these wide random weights make much of.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.1}
MEDIAN_BFLOAT16 = 0.03


def served_states(
    engine: EngineProcess, target: Path, folder: Path, dtype: str
) -> tuple[list[Record], list[captures.Captured]]:
    """Greedy answers by the engine, and every state that the heads were given meanwhile."""
    heads = write_heads(target, folder / "heads", 2)
    kept = folder / "states.safetensors"
    config = {"method": "bpd", "model": str(heads), "num_speculative_tokens": 2}
    batches = [greedy(PROMPTS, MAX_TOKENS)]
    job = make_job(target, batches, speculative_config=config, dtype=dtype, **ENGINE)
    job |= {"drafts": {"source": "plugin", "recordings": []}, "states": str(kept)}
    answers = token_ids(run(engine, job)["batches"][0])
    records = [Record(p, a, "length", "-") for p, a in zip(PROMPTS, answers, strict=True)]
    return records, captures.read(kept)


def find(records: list[Record], tokens: list[int]) -> int | None:
    """The row of the state that the last of `tokens` came from; none past an answer's end."""
    row = 0
    for record in records:
        text, prompt = record.prompt_token_ids + record.answer_token_ids, record.prompt_token_ids
        if len(tokens) > len(prompt) and text[: len(tokens)] == tokens:
            return row + len(tokens) - 1 - len(prompt)
        row += len(record.answer_token_ids)
    return None


def difference(ours_TD: torch.Tensor, theirs_TD: torch.Tensor) -> torch.Tensor:
    """[T]: the difference's length, relative to that of their state."""
    ours_TD, theirs_TD = ours_TD.float(), theirs_TD.float()
    lengths_T: torch.Tensor = torch.linalg.vector_norm(ours_TD - theirs_TD, dim=1)
    relative_T: torch.Tensor = lengths_T / torch.linalg.vector_norm(theirs_TD, dim=1)
    return relative_T


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_states_are_those_the_heads_are_given(
    engine: EngineProcess, targets: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    records, captured = served_states(engine, targets["llama"], tmp_path, dtype)
    found = [(find(records, one.tokens), one.state_D) for one in captured]
    pairs = [(row, state_D) for row, state_D in found if row is not None]
    # Only a step that ends its request samples tokens past the answer's end.
    assert len(found) - len(pairs) <= len(PROMPTS)
    rows = torch.tensor([row for row, _ in pairs])
    assert len(set(rows.tolist())) > len(PROMPTS) * MAX_TOKENS // 2
    served_TD = torch.stack([state_D for _, state_D in pairs])
    assert served_TD.dtype == getattr(torch, dtype)

    model = load_model(str(targets["llama"]), getattr(torch, dtype), "cpu")
    stored_TD = hidden_states(model, records)
    if dtype == "float32":  # as they are before they are stored in bfloat16
        exact_TD = torch.cat([states_alone(model, record) for record in records])
        assert difference(exact_TD[rows], served_TD).max() < TOLERANCES[dtype]
        served_TD = served_TD.bfloat16()
        assert difference(stored_TD[rows], served_TD).max() <= 2**-7  # one step of bfloat16
    else:
        differing_T = difference(stored_TD[rows], served_TD)
        assert differing_T.max() < TOLERANCES[dtype]
        assert differing_T.median() < MEDIAN_BFLOAT16
    # What other states would give: the next position's, and those before the final norm.
    inner = rows[rows + 1 < len(stored_TD)]
    assert difference(stored_TD[inner + 1], stored_TD[inner]).median() > 0.3
    before_TD = torch.cat([states_alone(model, r, before_norm=True) for r in records])
    assert difference(before_TD[rows], served_TD).median() > 0.3


def states_alone(model: Any, record: Record, before_norm: bool = False) -> torch.Tensor:
    """[A, D] in the model's dtype: the states under one record's answer, run alone."""
    ids_BL = torch.tensor([(record.prompt_token_ids + record.answer_token_ids)[:-1]])
    given: list[torch.Tensor] = []
    hook = model.base_model.norm.register_forward_hook(
        lambda _module, arguments, _made: given.append(arguments[0])
    )
    hidden_BLD = last_hidden_state(model, ids_BL)
    hook.remove()
    whole_LD = (given[0] if before_norm else hidden_BLD)[0]
    return whole_LD[len(record.prompt_token_ids) - 1 :]


@pytest.mark.parametrize(("beams", "answer_tokens"), [(1, 12), (6, 2)])
def test_both_engines_give_the_same_answers(tmp_path: Path, beams: int, answer_tokens: int) -> None:
    """In float32, greedy and by beams: `bpd-train generate` with vLLM and with transformers."""
    prompts = ["What is the ship? " * n for n in (1, 2, 5, 9)]
    config = chat_config(
        tmp_path, prompts, beams=beams, answer_tokens=answer_tokens, max_num_seqs=8
    )
    generate_apart(config)
    ours = GenerateConfig(
        **{**config.__dict__, "engine": "transformers", "output": tmp_path / "transformers"}
    )
    generate(ours)
    by_vllm, by_transformers = (
        [record for path in answer_files(one.output) for record in read_records(path)]
        for one in (config, ours)
    )
    assert len(by_vllm) == 4
    assert by_vllm == by_transformers


def test_many_sampled_answers_at_once(tmp_path: Path) -> None:
    """More tokens of seeded prompts than a step of the engine takes: V1 would split one."""
    prompts = [f"{n} " + "What is the ship? " * 12 for n in range(120)]
    config = chat_config(tmp_path, prompts, temperature=1.0, answer_tokens=4, max_num_seqs=128)
    generate_apart(config)
    records = [record for path in answer_files(config.output) for record in read_records(path)]
    assert len(records) == len(prompts)
    assert sum(len(record.prompt_token_ids) for record in records) > 8192


def chat_config(tmp_path: Path, prompts: list[str], **more: Any) -> GenerateConfig:
    """To answer `prompts` by a tiny chat target in vLLM, in float32."""
    target, file = write_chat_target(tmp_path / "target"), tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    file.write_text("".join(lines), encoding="utf-8")
    return GenerateConfig(
        str(target),
        tmp_path / "vllm",
        (file,),
        0,
        engine="vllm",
        max_model_len=256,
        dtype="float32",
        **more,
    )


def generate_apart(config: GenerateConfig) -> None:
    """`bpd-train generate` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "heads_training.cli", "generate", *to_options(config)],
        env=engine_environment(COMBOS[0]),
        cwd=REPOSITORY,
        timeout=JOB_TIMEOUT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
