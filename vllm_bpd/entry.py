"""What users touch: the command line, `EngineArgs` and `SpeculativeConfig` learn the word `bpd`.

The functions here are the replacements of `patches.ENTRY` and of the config rows of
`patches.RUNNERS`; each gets the original first and passes everything through for other methods.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from vllm_bpd.errors import HeadsError, named, shown

METHOD = "bpd"
logger = logging.getLogger(__name__)

# Where the engine whose config is being made downloads weights to: a speculative config is made
# before the load config, and is not told.
download_dir: ContextVar[str | None] = ContextVar("download_dir", default=None)

# Why `bpd` is refused in this process; None where it works.
_refused: str | None = None


def refuse(reason: str) -> None:
    """Make every way of naming `bpd` fail with `reason`; other methods keep working."""
    global _refused
    _refused = f"speculative method bpd: {reason}; `vllm-bpd doctor` shows every touched symbol"
    logger.warning("%s", _refused)


def new_speculative_config(original: Callable[..., Any], cls: type, *_: Any, **kwargs: Any) -> Any:
    """`SpeculativeConfig(method="bpd", ...)` makes our subclass of it."""
    from vllm.config import SpeculativeConfig

    if cls is not SpeculativeConfig or kwargs.get("method") != METHOD:
        return original(cls)
    if _refused:
        raise HeadsError(_refused)
    from vllm_bpd.speculative import BpdSpeculativeConfig

    return original(BpdSpeculativeConfig)


def create_engine_config(
    original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """Take the bare word, and show a user's mistake on the command line as one line."""
    if getattr(engine_args, "speculative_config", None) == METHOD:
        engine_args.speculative_config = {"method": METHOD}
    outside = download_dir.set(getattr(engine_args, "download_dir", None))
    try:
        return original(engine_args, *args, **kwargs)
    except Exception as error:
        mistake = _mistake(error)
        if mistake is None:
            raise
        if runs_vllm_command():
            raise SystemExit(f"vllm: error: {mistake}") from None
        raise mistake from None
    finally:
        download_dir.reset(outside)


def _mistake(error: Exception) -> HeadsError | None:
    """A user's mistake in the options of `bpd`, as one line; None for any other error.

    pydantic checks names and types before our own checks can, and says it in several lines.
    """
    from pydantic import ValidationError

    if isinstance(error, HeadsError):
        return error
    if not isinstance(error, ValidationError) or error.title != "BpdSpeculativeConfig":
        return None
    first = error.errors(include_url=False)[0]
    message = " ".join(first["msg"].removeprefix("Value error, ").split()).rstrip(".")
    if not first["loc"]:  # from within vLLM's own checks of several fields, which it names
        return HeadsError(f"speculative_config: {message}; correct it or leave it out")
    from vllm_bpd.speculative import is_foreign, no_meaning

    option = str(first["loc"][0])
    if is_foreign(option):
        return no_meaning(option, first["input"])
    # Behind them pydantic names the types that it tried.
    places = takewhile(lambda part: isinstance(part, int) or part.isidentifier(), first["loc"][1:])
    name = ".".join([named(option), *map(str, places)])
    return HeadsError(
        f"{name}: found {shown(first['input'])}; {message}; correct it or leave it out"
    )


def runs_vllm_command() -> bool:
    """Whether this process is `vllm ...`, where a mistake is one line and no traceback.

    A program of the user's own gets the exception, even if it borrows vLLM's argument parser.
    """
    program = Path(sys.argv[0])
    return program.name == "vllm" or "entrypoints" in program.parts


def add_cli_args(
    original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Let `--speculative-config bpd` and `--spec-method bpd` parse, and say so in --help."""
    parser = original(parser)
    # A vLLM that is refused may lack either option, and must still serve without `bpd`.
    config = parser._option_string_actions.get("--speculative-config")
    if config is not None:
        _take_bare_word(config)
    method = parser._option_string_actions.get("--spec-method")
    if method is not None and method.choices is not None:
        method.choices = [*method.choices, METHOD]
    return parser


def _take_bare_word(option: argparse.Action) -> None:
    parse_json: Any = option.type

    def speculative_config(text: str) -> Any:
        return {"method": METHOD} if text == METHOD else parse_json(text)

    option.type = speculative_config
    option.help = (
        f"{option.help or ''}\n\nThe bare word `bpd` serves blockwise heads (vllm-bpd): those "
        "inside the target's folder, or those shipped for it."
    )


def async_methods(original: Any) -> Any:
    """The methods that may use async scheduling, ours included."""
    return Literal[original, "bpd"]


def check_vllm_config(original: Callable[[Any], None], vllm_config: Any) -> None:
    """V2 keeps async scheduling; V1 drafts after its bookkeeping, so it cannot have it.

    Pipeline stages need it: without, drafts reach the scheduler before the token that they follow,
    and it plans them too early. `ngram` fails there alike.
    """
    if getattr(vllm_config.speculative_config, "method", None) != METHOD:
        original(vllm_config)
        return
    scheduler = vllm_config.scheduler_config
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if not vllm_config.use_v2_model_runner:
        if scheduler.async_scheduling:
            raise HeadsError(
                "async_scheduling: found True; bpd on model runner V1 drafts after the "
                "sampled tokens are known; leave it out, or use model runner V2 "
                "(VLLM_USE_V2_MODEL_RUNNER=1)"
            )
        if stages > 1:
            raise HeadsError(
                f"pipeline_parallel_size: found {stages}; bpd on model runner V1 serves one "
                "stage; use tensor parallelism, or model runner V2 "
                "(VLLM_USE_V2_MODEL_RUNNER=1)"
            )
        scheduler.async_scheduling = False
    original(vllm_config)
    if stages > 1 and not scheduler.async_scheduling:
        raise HeadsError(
            f"pipeline_parallel_size: found {stages} without async scheduling; bpd serves several "
            "stages with it alone; leave async_scheduling out, or use tensor parallelism"
        )


def keep_dynamic_schedule(original: Callable[[Any], None], vllm_config: Any) -> None:
    """0.33 drops dynamic schedules on V1 but for proposers it knows to honour them: ours does."""
    if getattr(vllm_config.speculative_config, "method", None) != METHOD:
        original(vllm_config)


def v2_unsupported_features(original: Callable[[Any], list[str]], vllm_config: Any) -> list[str]:
    """0.29 lists what V2 lacks, every method that it does not know included: ours it can have."""
    return [
        feature for feature in original(vllm_config) if feature != f"speculative method '{METHOD}'"
    ]


def refuse_dynamic_schedule_on_v2(original: Callable[[Any], None], vllm_config: Any) -> None:
    """Before 0.32, V2 verifies all drafts of every step: a schedule would be ignored in silence."""
    speculative = vllm_config.speculative_config
    schedule = getattr(speculative, "num_speculative_tokens_per_batch_size", None)
    ours = getattr(speculative, "method", None) == METHOD
    if ours and schedule is not None and vllm_config.use_v2_model_runner:
        raise HeadsError(
            f"num_speculative_tokens_per_batch_size: found {shown(schedule)}; model runner V2 "
            "follows no schedule before vLLM 0.32; leave it out, or use model runner V1 "
            "(VLLM_USE_V2_MODEL_RUNNER=0)"
        )
    original(vllm_config)
