"""`vllm-bpd tune`: measures on this machine how far drafting pays, by batch size.

Model runner V1 takes drafts of any length, so there the lowest confidence is tuned, and whether the
heads run, all settings in one engine, taking turns. V2 verifies a fixed number a step: there the
number of drafts is tuned, with an engine each.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_bpd.arguments import at_least_one, output_file
from vllm_bpd.discovery import find_heads
from vllm_bpd.errors import HeadsError, read_json_lines
from vllm_bpd.tuning import OFF, Key, Setting, as_options, as_ranges, choose, choose_settings, ratio

# Model runner V1: what is tried. A busy machine wants surer drafts than an idle one.
SETTINGS = (
    *(Setting(lowest, heads=True) for lowest in (0.05, 0.1, 0.2, 0.35, 0.5)),
    *(Setting(lowest, heads=False) for lowest in (0.1, 0.2, 0.35, 0.5, 0.7, 0.9)),
    OFF,
)
# Model runner V2: numbers of drafts that are tried; 0 is an engine without speculation.
DRAFTS = (0, 1, 2, 3, 4, 6, 8)
_ENOUGH_REQUESTS = 12  # a load has at least so many, whatever the concurrency


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm-bpd tune`."""
    parser.add_argument("target", help="model folder or hub id")
    parser.add_argument("--heads", help="folder or hub id of heads, instead of looking for them")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt` (default: the demo's)")
    parser.add_argument(
        "--batch-sizes",
        type=at_least_one,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        help="requests at once",
    )
    parser.add_argument(
        "--max-tokens", type=at_least_one, default=64, help="longest answer, tokens"
    )
    parser.add_argument(
        "--rounds", type=at_least_one, default=3, help="each setting is measured so often"
    )
    parser.add_argument("--dtype", default="auto", help="of the target, as served")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens, as served")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="largest batch, as served")
    parser.add_argument("--enforce-eager", action="store_true", help="as served")
    parser.add_argument("--output", type=output_file, default="bpd-tuned.json", help="the config")
    parser.add_argument("--results", type=output_file, help="JSON file for every measured speed")


def tune(arguments: argparse.Namespace) -> None:
    """Measure, print the table, write the config. Raises HeadsError for a user's mistake."""
    sizes = sorted(set(arguments.batch_sizes))
    heads = find_heads(arguments.target, arguments.heads)  # refuses before minutes of measuring
    prompts = _prompts(arguments)
    speculative = {"method": "bpd", **({"model": arguments.heads} if arguments.heads else {})}
    if _uses_v2(arguments, speculative):
        counts = [count for count in DRAFTS if count <= heads.config.max_drafts]
        by_drafts = _tune_drafts(arguments, speculative, prompts, sizes, counts)
        drafts = {size: choose(speeds, 0) for size, speeds in by_drafts.items()}
        print(as_table(by_drafts, drafts, 0))
        ranges = as_ranges(drafts, arguments.max_num_seqs)
        config = {
            **speculative,
            "num_speculative_tokens": max(1, *drafts.values()),
            "num_speculative_tokens_per_batch_size": [(a, b, int(n)) for a, b, n in ranges],
        }
        speeds_by_name = _named(by_drafts)
    else:
        by_setting = _tune_settings(arguments, speculative, prompts, sizes)
        chosen = choose_settings(by_setting)
        print(as_table(by_setting, chosen, OFF))
        config = {**speculative, **as_options(chosen, arguments.max_num_seqs)}
        speeds_by_name = _named(by_setting)
    arguments.output.write_text(json.dumps(config) + "\n", encoding="utf-8")
    if arguments.results:
        _write_results(arguments.results, speeds_by_name, config)
    print(f'use it: vllm serve {arguments.target} --speculative-config "$(cat {arguments.output})"')


Measured = Mapping[int, Mapping[Key, Sequence[float]]]  # tokens a second by size and setting


def as_table(measured: Measured[Key], chosen: Mapping[int, Key], off: Key) -> str:
    """Speed over that without drafts, a line a setting, a column a batch size; chosen starred."""
    lines = ["requests at once" + "".join(f"{size:>8}" for size in measured)]
    for setting in next(iter(measured.values())):
        cells = [
            f"{ratio(speeds, setting, off):>7.2f}{'*' if setting == chosen[size] else ' '}"
            for size, speeds in measured.items()
        ]
        lines.append(f"{setting!s:<16}{''.join(cells)}")
    return "\n".join(lines)


def _named(measured: Measured[Key]) -> dict[str, dict[str, list[float]]]:
    """The same with text for keys, as JSON wants them."""
    return {
        str(size): {str(setting): list(rounds) for setting, rounds in speeds.items()}
        for size, speeds in measured.items()
    }


def _tune_settings(
    arguments: argparse.Namespace,
    speculative: dict[str, Any],
    prompts: list[list[int]],
    sizes: Sequence[int],
) -> dict[int, dict[Setting, list[float]]]:
    from vllm_bpd.closed_loop import closed_loop

    with _engine(arguments, speculative, max(sizes)) as llm:
        # In one process the drafter reads this very object, at every step.
        config = llm.llm_engine.vllm_config.speculative_config
        measured: dict[int, dict[Setting, list[float]]] = {}
        for size in sizes:
            load = _load(prompts, size)
            closed_loop(llm, load, size, arguments.max_tokens, f"warm-{size}")
            speeds: dict[Setting, list[float]] = {setting: [] for setting in SETTINGS}
            for number in range(arguments.rounds):
                # Forwards, then backwards: no setting is always measured first.
                for setting in SETTINGS[:: -1 if number % 2 else 1]:
                    config.min_confidence_per_batch_size = [(1, size, setting.lowest)]
                    config.heads_up_to_batch_size = None if setting.heads else 0
                    name = f"{size}-{number}-{setting}"
                    speeds[setting].append(closed_loop(llm, load, size, arguments.max_tokens, name))
            measured[size] = speeds
            print(f"{size} at once: measured", flush=True)
    return measured


def _tune_drafts(
    arguments: argparse.Namespace,
    speculative: dict[str, Any],
    prompts: list[list[int]],
    sizes: Sequence[int],
    counts: Sequence[int],
) -> dict[int, dict[int, list[float]]]:
    from vllm_bpd.closed_loop import closed_loop

    measured: dict[int, dict[int, list[float]]] = {size: {} for size in sizes}
    for drafts in counts:
        chosen = {**speculative, "num_speculative_tokens": drafts} if drafts else None
        with _engine(arguments, chosen, max(sizes)) as llm:
            for size in sizes:
                load = _load(prompts, size)
                closed_loop(llm, load, size, arguments.max_tokens, f"warm-{size}")
                measured[size][drafts] = [
                    closed_loop(llm, load, size, arguments.max_tokens, f"{size}-{number}")
                    for number in range(arguments.rounds)
                ]
        print(f"{drafts} drafts a step: measured", flush=True)
    return measured


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
        enforce_eager=arguments.enforce_eager,
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
    texts = []
    for where, values in read_json_lines(path, "a prompt file"):
        text = values.get("prompt")
        if not isinstance(text, str):
            raise HeadsError(f"prompts: {where}: expected an object with a text `prompt`")
        texts.append(text)
    if not texts:
        raise HeadsError(f"prompts: {path}: found no line; expected one prompt a line")
    return texts


def _write_results(
    path: Path, speeds: dict[str, dict[str, list[float]]], config: dict[str, Any]
) -> None:
    import platform
    from importlib.metadata import version

    path.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "config": config,
        "tokens_per_second": speeds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("vllm", "torch", "vllm-bpd")},
    }
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
