"""Several engine processes for one folder: they share the chunks, and their failures are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heads_training.cli import build_parser, recipe_from
from heads_training.generate import GenerateConfig, generate
from heads_training.parallel import engine_environments, last_word, to_options
from heads_training.records import chunk_paths, read_records
from vllm_bpd.errors import HeadsError


@pytest.mark.parametrize(
    "config",
    [
        GenerateConfig("t", Path("o")),
        GenerateConfig(
            "a/t",
            Path("o/p"),
            (Path("a.jsonl"), Path("b.jsonl")),
            7,
            dataset="d/e",
            teacher="m",
            answers_from="target",
            engine="transformers",
            temperature=0.25,
            drop_loops=True,
            worker=1,
            workers=3,
        ),
    ],
)
def test_options_give_the_config_back(config: GenerateConfig) -> None:
    args = build_parser().parse_args(["generate", *to_options(config)])
    assert recipe_from(args).generate == config


def test_two_processes_make_what_one_makes(chat_target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(6)))
    config = GenerateConfig(
        str(chat_target), tmp_path / "one", (prompts,), 0, answer_tokens=4, chunk=2,
        engine="transformers", max_model_len=512, dtype="float32",
    )  # fmt: skip
    written = generate(config)
    shared = replace(config, output=tmp_path / "two", engines=2)
    assert generate(shared) == written
    files = [
        {path.name: path.read_bytes() for path in chunk_paths(folder)}
        for folder in (config.output, shared.output)
    ]
    assert files[0] == files[1]
    assert sum(len(read_records(path)) for path in chunk_paths(shared.output)) == 6
    assert len(list(shared.output.glob("engine-*.log"))) == 2


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("", "no word"),
        ("starting\n\n", "starting"),
        ("error: target: found none\n", "error: target: found none"),
        (
            "Traceback (most recent call last):\n  File x\nvllm.v1.EngineDeadError: it died\n"
            "resource_tracker.py:254: UserWarning: 1 leaked\n  warnings.warn('leaked')\n",
            "vllm.v1.EngineDeadError: it died",
        ),
        ("ValueError: first\nduring it\nRuntimeError: second\nbye\n", "RuntimeError: second"),
    ],
)
def test_a_log_says_why(log: str, why: str) -> None:
    assert last_word(log) == why


def test_a_failing_process_is_told_in_one_line(chat_target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    config = GenerateConfig(
        str(chat_target), tmp_path / "out", (prompts,), 0, answer_tokens=4, chunk=1, engines=2,
        engine="transformers", max_model_len=4096,
    )  # fmt: skip
    with pytest.raises(HeadsError, match="engines: 2 of 2 failed") as caught:
        generate(config)
    assert "engine-1.log (status 2): error: max_model_len: found 4096" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert engine_environments(2, 2) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    with pytest.raises(HeadsError, match="engines: found 3, of 2 GPUs each; expected at most 2"):
        engine_environments(3, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,5,7")
    assert engine_environments(2, 1)[1] == {"CUDA_VISIBLE_DEVICES": "6"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the user's own choice stays
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert engine_environments(1, 1) == [
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "3"}
    ]
