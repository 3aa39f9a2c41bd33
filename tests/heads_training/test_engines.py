"""transformers as the engine; vLLM's is compared with it in integration_tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from heads_training.engines import (
    Completion,
    EngineOptions,
    Request,
    TransformersEngine,
    VllmEngine,
    open_engine,
)
from heads_training.target import load_causal_lm
from vllm_bpd.errors import HeadsError

PROMPTS = [[5, 9, 200], [7] * 12, [31], [8, 100, 17, 250, 44, 90]]


def options(folder: Path, **changes: object) -> EngineOptions:
    values: dict[str, object] = {"max_model_len": 128, "max_num_seqs": 3, "stop_ids": ()}
    return EngineOptions(folder, "float32", **{**values, **changes})  # type: ignore[arg-type]


def greedy_alone(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Token by token, without batches, padding or cache."""
    model, ids = load_causal_lm(folder, "float32"), list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_batch_says_what_each_says_alone(chat_target: Path) -> None:
    engine = TransformersEngine(options(chat_target))
    lengths = [20, 9, 14, 20]
    requests = [Request(ids, n) for ids, n in zip(PROMPTS, lengths, strict=True)]
    expected = [
        Completion(greedy_alone(chat_target, ids, n), "length")
        for ids, n in zip(PROMPTS, lengths, strict=True)
    ]
    assert engine.complete(requests) == expected
    # Stopped at a token that some say: it is kept, and nothing behind it.
    stop = expected[0].token_ids[6]
    cut = TransformersEngine(options(chat_target, stop_ids=(stop,))).complete(requests)
    for whole, one in zip(expected, cut, strict=True):
        if stop in whole.token_ids:
            end = whole.token_ids.index(stop) + 1
            assert one == Completion(whole.token_ids[:end], "stop")
        else:
            assert one == whole
    assert cut[0].finish_reason == "stop"


def test_sampling_repeats_for_one_seed(chat_target: Path) -> None:
    engine = TransformersEngine(options(chat_target, max_num_seqs=1))

    def sample(seed: int, top_p: float = 1.0) -> list[Completion]:
        return engine.complete([Request(ids, 12, 1.5, top_p, seed) for ids in PROMPTS])

    state = torch.random.get_rng_state()
    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's draws change
    greedy = engine.complete([Request(ids, 12) for ids in PROMPTS])
    assert sample(3, top_p=1e-6) == greedy  # only the likeliest token is left
    assert sample(3) != greedy


def best_pair(folder: Path, prompt: list[int], beams: int) -> list[int]:
    """The likeliest two tokens whose first is among the `beams` likeliest."""
    model = load_causal_lm(folder, "float32")
    with torch.inference_mode():
        first_V = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        scores, ids = first_V.topk(beams)
        rows = torch.tensor([[*prompt, int(token)] for token in ids])
        second_BV = model(input_ids=rows).logits[:, -1].log_softmax(-1)
    whole_BV = scores.unsqueeze(1) + second_BV
    row, token = divmod(int(whole_BV.argmax()), whole_BV.shape[1])
    return [int(ids[row]), token]


def test_beams_find_the_likeliest_pair(chat_target: Path) -> None:
    beams = 6
    engine = TransformersEngine(options(chat_target, beams=beams))
    found = [one.token_ids for one in engine.beam_search(PROMPTS, 2)]
    assert found == [best_pair(chat_target, prompt, beams) for prompt in PROMPTS]
    assert found != [one.token_ids for one in engine.complete([Request(p, 2) for p in PROMPTS])]


def test_the_context_is_checked(chat_target: Path) -> None:
    with pytest.raises(HeadsError, match="max_model_len: found 600; the target's context is 512"):
        TransformersEngine(options(chat_target, max_model_len=600))
    with pytest.raises(HeadsError, match="tensor_parallel: found 2"):
        TransformersEngine(options(chat_target, tensor_parallel=2))


def test_transformers_where_vllm_is_missing(
    chat_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name)
    )
    assert isinstance(open_engine("auto", options(chat_target)), TransformersEngine)
    made: list[EngineOptions] = []
    monkeypatch.setattr(VllmEngine, "__init__", lambda self, given: made.append(given))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert isinstance(open_engine("auto", options(chat_target)), VllmEngine)
    assert isinstance(open_engine("vllm", options(chat_target)), VllmEngine)
    assert len(made) == 2
