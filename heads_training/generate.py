"""Answers from the target through vLLM's offline engine, written to disk as they come.

One JSON object a line: `prompt_token_ids`, `answer_token_ids`, `finish_reason`, `source`.
Heads are trained on exactly what the served target says, token for token, so ids are stored and
text is never tokenised again.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from heads_training.prompts import Prompt, pick_openers, read_prompts, user_prefix
from vllm_bpd.errors import HeadsError

logger = logging.getLogger(__name__)

SETTINGS_FILE = "generate.json"  # beside the answers: the options they were made with


@dataclass(frozen=True)
class GenerateConfig:
    """How the training answers are made."""

    target: Annotated[str, "model folder or hub id"]
    output: Annotated[Path, "folder that receives answers-<chunk>.jsonl"]
    prompts: Annotated[tuple[Path, ...], "JSONL prompt files, used beside self-written ones"] = ()
    self_written: Annotated[int, "prompts the target writes itself"] = 2000
    answer_tokens: Annotated[int, "longest answer, tokens"] = 256
    chunk: Annotated[int, "prompts a chunk; one file each, written whole or not at all"] = 256
    seed: Annotated[int, "draws openers, sampling and order"] = 0
    worker: Annotated[int, "this process's index: it makes chunks worker, worker + workers, .."] = 0
    workers: Annotated[int, "processes that share the work, each with its own engine"] = 1
    max_model_len: Annotated[int, "tokens, prompt and answer"] = 2048
    max_num_seqs: Annotated[int, "requests decoded at once"] = 128
    dtype: Annotated[str, "the engine's dtype, the one that will be served"] = "auto"

    def __post_init__(self) -> None:
        """Refuse impossible values. Raises HeadsError naming field, found and expected."""
        for name in ("answer_tokens", "chunk", "workers", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected at least 1")
        if not 0 <= self.worker < self.workers:
            raise HeadsError(f"worker: found {self.worker}; expected 0..{self.workers - 1}")
        if self.self_written < 0 or not (self.self_written or self.prompts):
            raise HeadsError(
                f"self_written: found {self.self_written}; expected at least 1, or prompt files"
            )
        if self.max_model_len <= self.answer_tokens:
            raise HeadsError(
                f"max_model_len: found {self.max_model_len}; expected more than answer_tokens "
                f"({self.answer_tokens}), to leave room for a prompt"
            )


def check_settings(config: GenerateConfig) -> None:
    """Write the options beside the answers, or compare with those of the answers there.

    Raises HeadsError if they differ: other options deal other prompts to each chunk.
    """
    path = config.output / SETTINGS_FILE
    settings = {n: v for n, v in asdict(config).items() if n not in ("output", "worker", "workers")}
    settings["target"] = Path(config.target).name
    settings["prompts"] = [prompts.name for prompts in config.prompts]
    if not path.exists():
        config.output.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial{config.worker}")
        partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in settings if found.get(name) != settings[name]]
    except (OSError, ValueError, AttributeError) as error:
        raise HeadsError(
            f"{path}: not readable ({error}); delete it, or use another folder"
        ) from None
    if differing:
        name = differing[0]
        raise HeadsError(
            f"{path}: {name}: found {found.get(name)!r}, this run has {settings[name]!r}; give the "
            "same options to go on, or another folder for the answers"
        )


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


def _answer(
    llm: Any, tokenizer: Any, prompts: list[Prompt], config: GenerateConfig
) -> list[dict[str, Any]]:
    """Greedy answers, as records; prompts that leave an answer no room are left out, and logged."""
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
    if len(kept) < len(prompts):
        logger.warning(
            "%d prompts of more than %d tokens left out; raise --max-model-len to keep them",
            len(prompts) - len(kept),
            longest,
        )
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
    """Write every chunk of this worker that is not on disk yet; answer tokens written.

    Raises HeadsError for prompt files or a tokenizer that cannot be used.
    """
    plan = list(_plan(config))
    check_settings(config)
    todo = [
        (number, items, path)
        for number, items in plan
        if number % config.workers == config.worker
        and not (path := config.output / f"answers-{number:05d}.jsonl").exists()
    ]
    if not todo:
        logger.info("%s: every answer is there already", config.output)
        return 0
    llm = _engine(config)
    try:
        return _write_chunks(llm, config, todo)
    finally:
        # Otherwise the engine's processes hold their memory and cores until this one ends,
        # through all of the training that `bpd-train all` goes on with.
        llm.llm_engine.engine_core.shutdown()


def _write_chunks(
    llm: Any, config: GenerateConfig, todo: list[tuple[int, list[Prompt | tuple[str, int]], Path]]
) -> int:
    """Make and write the chunks `todo`: (number, prompts or openers, file); answer tokens made."""
    from tqdm import tqdm

    tokenizer, written = llm.get_tokenizer(), 0
    with tqdm(total=sum(len(items) for _, items, _ in todo), unit="prompt") as bar:
        for number, items, path in todo:
            openers = [item for item in items if isinstance(item, tuple)]
            prompts = [item for item in items if isinstance(item, Prompt)]
            # One seed a request, never used twice over all chunks.
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


def _engine(config: GenerateConfig) -> Any:
    """vLLM's offline engine for the target, without speculation."""
    # On a CPU vLLM would else take 92% of the memory for its KV cache. GiB; GPUs ignore it.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM

    return LLM(
        config.target,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        seed=config.seed,
    )
