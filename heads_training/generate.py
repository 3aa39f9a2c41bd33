"""Answers from the target through vLLM's offline engine, written to disk as they come.

One JSON object a line: `prompt_token_ids`, `answer_token_ids`, `finish_reason`, `source`.
Heads are trained on exactly what the served target says, token for token, so ids are stored and
text is never tokenised again.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads_training.prompts import Prompt, pick_openers, read_prompts, user_prefix

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerateConfig:
    """How the training answers are made."""

    target: str  # model folder or hub id
    output: Path  # folder that receives answers-<worker>-<chunk>.jsonl
    prompts: tuple[Path, ...] = ()  # JSONL prompt files; may be used beside self-written ones
    self_written: int = 2000  # prompts the target writes itself
    answer_tokens: int = 256  # longest answer, tokens
    chunk: int = 256  # prompts a chunk; one file each, written whole or not at all
    seed: int = 0  # draws openers, sampling and order
    worker: int = 0  # this process's index: chunk i belongs to worker i % workers
    workers: int = 1  # processes that share the work, each with its own engine
    max_model_len: int = 2048  # tokens, prompt and answer
    max_num_seqs: int = 128  # requests decoded at once
    dtype: str = "auto"  # the engine's dtype, the one that will be served


def chunk_paths(folder: Path) -> list[Path]:
    """The finished answer files of `folder`, in order."""
    return sorted(folder.glob("answers-*.jsonl"))


def _plan(config: GenerateConfig) -> Iterator[tuple[int, list[Prompt | tuple[str, int]]]]:
    """(chunk number, prompts or openers): the same for every worker and every restart."""
    items: list[Prompt | tuple[str, int]] = []
    for path in config.prompts:
        items.extend(read_prompts(path))
    items.extend(pick_openers(config.self_written, config.seed))
    random.Random(config.seed).shuffle(items)
    for start in range(0, len(items), config.chunk):
        yield start // config.chunk, items[start : start + config.chunk]


def _write_user_turns(
    llm: Any, tokenizer: Any, openers: list[tuple[str, int]], seed: int
) -> list[Prompt]:
    """User turns sampled from the target, each behind the template's user prefix and an opener."""
    from vllm import SamplingParams

    if not openers:
        return []
    prefix = user_prefix(tokenizer)
    eos = tokenizer.eos_token_id
    requests = [
        {"prompt_token_ids": tokenizer.encode(prefix + text, add_special_tokens=False)}
        for text, _ in openers
    ]
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=limit, seed=seed + i, stop_token_ids=[eos]
        )
        for i, (_, limit) in enumerate(openers)
    ]
    prompts = []
    outputs = llm.generate(requests, params, use_tqdm=False)
    for (opener, _), output in zip(openers, outputs, strict=True):
        text = (opener + output.outputs[0].text).strip()
        if len(text) >= 12:  # characters; shorter ones are openers the target left unfinished
            source = "self-written:" + (opener.strip() or "free")
            prompts.append(Prompt(({"role": "user", "content": text},), source))
    return prompts


def _answer(llm: Any, tokenizer: Any, prompts: list[Prompt], config: GenerateConfig) -> list[dict]:
    from vllm import SamplingParams

    longest = config.max_model_len - config.answer_tokens
    requests, kept = [], []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(ids) <= longest:
            requests.append({"prompt_token_ids": ids})
            kept.append(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=config.answer_tokens, detokenize=False)
    outputs = llm.generate(requests, params, use_tqdm=False)
    return [
        {
            "prompt_token_ids": request["prompt_token_ids"],
            "answer_token_ids": list(output.outputs[0].token_ids),
            "finish_reason": output.outputs[0].finish_reason,
            "source": prompt.source,
        }
        for request, prompt, output in zip(requests, kept, outputs, strict=True)
    ]


def generate(config: GenerateConfig) -> int:
    """Write every chunk of this worker that is not on disk yet; answer tokens written."""
    from tqdm import tqdm

    config.output.mkdir(parents=True, exist_ok=True)
    todo = [
        (number, items, path)
        for number, items in _plan(config)
        if number % config.workers == config.worker
        and not (path := config.output / f"answers-{number:05d}.jsonl").exists()
    ]
    if not todo:
        logger.info("%s: every answer is there already", config.output)
        return 0
    from vllm import LLM

    llm = LLM(
        config.target,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        seed=config.seed,
    )
    tokenizer = llm.get_tokenizer()
    written = 0
    with tqdm(total=sum(len(items) for _, items, _ in todo), unit="prompt") as bar:
        for number, items, path in todo:
            openers = [item for item in items if isinstance(item, tuple)]
            prompts = [item for item in items if isinstance(item, Prompt)]
            seed = config.seed + number * config.chunk
            prompts += _write_user_turns(llm, tokenizer, openers, seed)
            records = _answer(llm, tokenizer, prompts, config)
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
            partial.replace(path)
            written += sum(len(r["answer_token_ids"]) for r in records)
            bar.update(len(items))
            bar.set_postfix(answer_tokens=written)
    return written
