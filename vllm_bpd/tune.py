"""`vllm-bpd tune`: measures on this machine how far drafting pays, by batch size.

Model runner V1 takes drafts of any length, so there the lowest confidence is tuned, all settings in
one engine, taking turns. V2 verifies a fixed number a step: there the number of drafts is tuned,
with an engine each.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_bpd.errors import HeadsError
from vllm_bpd.tuning import Speeds, as_ranges, choose, ratio

# Model runner V1: lowest confidences that are tried; 1.0 drafts nothing.
CONFIDENCES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0)
# Model runner V2: numbers of drafts that are tried; 0 is an engine without speculation.
DRAFTS = (0, 1, 2, 3, 4, 6, 8)
_ENOUGH_REQUESTS = 12  # a load has at least so many, whatever the concurrency


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm-bpd tune`."""
    parser.add_argument("target", help="model folder or hub id")
    parser.add_argument("--heads", help="folder or hub id of heads, instead of looking for them")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt` (default: the demo's)")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="requests at once"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer, tokens")
    parser.add_argument("--rounds", type=int, default=3, help="each setting is measured so often")
    parser.add_argument("--dtype", default="auto", help="of the target, as served")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens, as served")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="largest batch, as served")
    parser.add_argument("--output", type=Path, default=Path("bpd-tuned.json"), help="the config")
    parser.add_argument("--results", type=Path, help="JSON file for every measured speed")


def tune(arguments: argparse.Namespace) -> None:
    """Measure, print the table, write the config. Raises HeadsError for a user's mistake."""
    sizes = sorted(set(arguments.batch_sizes))
    if sizes[0] < 1:
        raise HeadsError(f"batch_sizes: found {sizes[0]}; expected 1 or more")
    prompts = _prompts(arguments)
    speculative = {"method": "bpd", **({"model": arguments.heads} if arguments.heads else {})}
    by_confidence = not _uses_v2(arguments, speculative)
    if by_confidence:
        measured = _tune_confidence(arguments, speculative, prompts, sizes)
        field, off = "min_confidence_per_batch_size", 1.0
    else:
        measured = _tune_drafts(arguments, speculative, prompts, sizes)
        field, off = "num_speculative_tokens_per_batch_size", 0.0
    chosen = {size: choose(speeds, off) for size, speeds in measured.items()}
    print(as_table(measured, chosen, off))
    ranges = as_ranges(chosen, arguments.max_num_seqs)
    if not by_confidence:
        ranges = [(first, last, int(drafts)) for first, last, drafts in ranges]
        speculative["num_speculative_tokens"] = max(1, *(int(n) for n in chosen.values()))
    config = {**speculative, field: ranges}
    arguments.output.write_text(json.dumps(config) + "\n", encoding="utf-8")
    if arguments.results:
        _write_results(arguments.results, measured, config)
    print(f'use it: vllm serve {arguments.target} --speculative-config "$(cat {arguments.output})"')


def as_table(measured: Mapping[int, Speeds], chosen: Mapping[int, float], off: float) -> str:
    """Speed over that without drafts, by setting and batch size; the chosen ones starred."""
    settings = sorted(next(iter(measured.values())))
    lines = ["requests at once  " + "".join(f"{setting:>8g}" for setting in settings)]
    for size, speeds in measured.items():
        cells = [
            f"{ratio(speeds, setting, off):>7.2f}{'*' if setting == chosen[size] else ' '}"
            for setting in settings
        ]
        lines.append(f"{size:<18}{''.join(cells)}")
    return "\n".join(lines)


def _tune_confidence(
    arguments: argparse.Namespace,
    speculative: dict[str, Any],
    prompts: list[list[int]],
    sizes: Sequence[int],
) -> dict[int, Speeds]:
    from vllm_bpd.closed_loop import closed_loop

    with _engine(arguments, speculative, max(sizes)) as llm:
        # In one process the drafter reads this very object, at every step.
        config = llm.llm_engine.vllm_config.speculative_config
        measured: dict[int, Speeds] = {}
        for size in sizes:
            load = _load(prompts, size)
            closed_loop(llm, load, size, arguments.max_tokens, f"warm-{size}")
            speeds: dict[float, list[float]] = {setting: [] for setting in CONFIDENCES}
            for number in range(arguments.rounds):
                # Forwards, then backwards: no setting is always measured first.
                for setting in CONFIDENCES[:: -1 if number % 2 else 1]:
                    config.min_confidence_per_batch_size = [(1, size, setting)]
                    name = f"{size}-{number}-{setting}"
                    run = closed_loop(llm, load, size, arguments.max_tokens, name)
                    speeds[setting].append(run.speed)
            measured[size] = speeds
            print(f"{size} at once: measured", flush=True)
    return measured


def _tune_drafts(
    arguments: argparse.Namespace,
    speculative: dict[str, Any],
    prompts: list[list[int]],
    sizes: Sequence[int],
) -> dict[int, Speeds]:
    from vllm_bpd.closed_loop import closed_loop
    from vllm_bpd.discovery import find_heads

    most = find_heads(arguments.target, arguments.heads).config.max_drafts
    measured: dict[int, dict[float, list[float]]] = {size: {} for size in sizes}
    for drafts in (count for count in DRAFTS if count <= most):
        chosen = {**speculative, "num_speculative_tokens": drafts} if drafts else None
        with _engine(arguments, chosen, max(sizes)) as llm:
            for size in sizes:
                load = _load(prompts, size)
                closed_loop(llm, load, size, arguments.max_tokens, f"warm-{size}")
                measured[size][drafts] = [
                    closed_loop(llm, load, size, arguments.max_tokens, f"{size}-{number}").speed
                    for number in range(arguments.rounds)
                ]
        print(f"{drafts} drafts a step: measured", flush=True)
    return dict(measured)


@contextmanager
def _engine(
    arguments: argparse.Namespace, speculative: dict[str, Any] | None, max_num_seqs: int
) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        arguments.target,
        speculative_config=speculative,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=max_num_seqs,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _uses_v2(arguments: argparse.Namespace, speculative: dict[str, Any]) -> bool:
    """Which model runner the engine would take; on V1, keeps the engine in this process."""
    from vllm import EngineArgs

    config = EngineArgs(
        model=arguments.target,
        speculative_config=speculative,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
    ).create_engine_config()
    if config.use_v2_model_runner:
        return True
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return False


def _load(prompts: list[list[int]], size: int) -> list[list[int]]:
    """As many prompts as keep `size` requests running for a while."""
    count = max(_ENOUGH_REQUESTS, 2 * size)
    return [prompts[i % len(prompts)] for i in range(count)]


def _prompts(arguments: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts, through the target's chat template if it has one."""
    from transformers import AutoTokenizer

    from vllm_bpd.demo.prompts import PROMPTS

    texts = list(PROMPTS) if arguments.prompts is None else _read_prompts(arguments.prompts)
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.target)
    if getattr(tokenizer, "chat_template", None) is None:
        found = [list(tokenizer.encode(text)) for text in texts]
    else:
        found = [
            list(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    add_generation_prompt=True,
                    return_dict=False,
                )
            )
            for text in texts
        ]
    room = arguments.max_model_len - arguments.max_tokens
    kept = [ids for ids in found if len(ids) <= room]
    if not kept:
        raise HeadsError(
            f"prompts: none is at most {room} tokens long (max_model_len - max_tokens); give "
            "shorter ones, or raise --max-model-len"
        )
    return kept


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise HeadsError(f"prompts: {path}: {error.strerror}; expected a JSONL file") from None
    texts = []
    for number, line in enumerate(lines, start=1):
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise HeadsError(f"prompts: {path}:{number}: expected an object with a text `prompt`")
        texts.append(text)
    if not texts:
        raise HeadsError(f"prompts: {path}: found no line; expected one prompt a line")
    return texts


def _write_results(path: Path, measured: Mapping[int, Speeds], config: dict[str, Any]) -> None:
    import platform
    from importlib.metadata import version

    path.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "config": config,
        "tokens_per_second": {
            str(size): {f"{setting:g}": list(rounds) for setting, rounds in speeds.items()}
            for size, speeds in measured.items()
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("vllm", "torch", "vllm-bpd")},
    }
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
