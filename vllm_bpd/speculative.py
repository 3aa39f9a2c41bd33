"""`SpeculativeConfig` for method `bpd`: finds the heads, refuses what cannot work, early.

Built in the front end before any weight is loaded, then sent to every worker.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from vllm.config import ModelConfig, SpeculativeConfig
from vllm.config.utils import config
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_bpd.agreement import Provenance, provenance
from vllm_bpd.arrival import arrive, plugin_build, plugin_version, send_by_value
from vllm_bpd.confidence import LARGEST, parse_schedule
from vllm_bpd.discovery import FoundHeads, find_heads
from vllm_bpd.entry import download_dir
from vllm_bpd.errors import HeadsError, shown
from vllm_bpd.patches import install_runners, vllm_version
from vllm_bpd.patching import PatchError, is_release

logger = logging.getLogger(__name__)

# Fields of SpeculativeConfig that mean something for blockwise heads. The others belong to other
# methods: set, they would be ignored in silence, so they are refused by name.
_OUR_FIELDS = {
    "method",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "revision",
    "enforce_eager",
    "draft_tensor_parallel_size",
    "draft_load_config",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "target_model_config",
    "target_parallel_config",
    "draft_model_config",
    "draft_parallel_config",
}


# How a worker may load heads: vLLM's loaders of plain safetensors files, and no weights at all.
HEADS_FORMATS = (
    "auto",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "dummy",
)


@config
class BpdSpeculativeConfig(SpeculativeConfig):
    """Serve blockwise heads: `{"method": "bpd", "model": DIR_OR_HUB_ID}`.

    `num_speculative_tokens` is the number of drafts, k - 1; it defaults to the most that the
    checkpoint can draft and may be less. That is its heads, and with a lattice and
    `context_lookup` the places behind them, where the request's own text goes on alone.
    """

    method: Literal["bpd"] = "bpd"
    """Always `bpd`."""

    context_lookup: bool = True
    """Also draft what followed earlier occurrences of a request's last words, in its own prompt and
    answer. Needs heads with a lattice, as `bpd-train` makes them; without one it has no effect."""

    context_window: int = Field(default=8192, ge=2, le=LARGEST)
    """How many of a request's last tokens are searched. Bounds the cost for long contexts."""

    min_confidence: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    """Drafts stop before the one that would be accepted with a lower probability than this. Saves
    verification on model runner V1; V2 always verifies `num_speculative_tokens`. None: 0.1, but
    on a CPU rising with the number of running requests, of which above `sampled_up_to` only the
    greedy ones draft (`confidence.ON_CPU`)."""

    min_confidence_per_batch_size: list[tuple[int, int, float]] | None = None
    """`min_confidence` by the number of running requests, as `[[1, 4, 0.1], [5, 16, 0.6], [17, 256,
    1.0]]`; 1.0 drafts nothing. What `vllm-bpd tune` writes. The last range goes on for more."""

    heads_up_to_batch_size: int | None = Field(default=None, ge=0, le=LARGEST)
    """With more running requests than this, the requests' own texts draft alone and the heads rest:
    on a busy machine their cost is a good part of a step. None: never, but on a CPU where no lowest
    confidence is given either, above `confidence.ON_CPU.heads_up_to`. Model runner V1."""

    provenance: Provenance | None = Field(init=False, default=None)
    """Which heads were found: what workers on other machines need to know. Not to be given."""

    if TYPE_CHECKING:  # the base class, and with it its fields, is Any
        num_speculative_tokens: int | None
        draft_tensor_parallel_size: int | None

    # `config` would make one that shows every nested config, a Hugging Face token included.
    __repr__ = SpeculativeConfig.__repr__

    def __post_init__(self) -> None:
        """Find and check the heads; raises HeadsError, one line, for what cannot work."""
        connect_runners()
        self._refuse_foreign_fields()
        self._refuse_other_formats()
        parse_schedule(self.min_confidence_per_batch_size, default=0.0)  # or refuse it
        target = self.target_model_config
        if target is None:
            raise HeadsError("target_model_config: missing; bpd needs the target's config")
        refuse_target(target)
        self._refuse_stages()
        found = find_heads(
            target.model,
            self.model,
            self.revision,
            target.hf_token,
            target.revision,
            download_dir.get(),
        )
        self._take_heads(found)
        logger.info(
            "bpd: %d drafts a step, %d heads, context lookup %s, %s (%s)",
            self.num_speculative_tokens,
            found.config.num_draft_heads,
            "on" if self.context_lookup and found.config.lattice_places else "off",
            found.source,
            found.folder,
        )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str | None], dict[str, Any]]:
        """Leave for another process: it must have this very plugin, and says so if not."""
        if "ray" in sys.modules:
            send_by_value()
        return arrive, (plugin_version(), _build()), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in another process: its runners must be connected before they are built."""
        connect_runners()
        self.__dict__.update(state)

    def _refuse_foreign_fields(self) -> None:
        for name, field in SpeculativeConfig.__dataclass_fields__.items():
            value = getattr(self, name)
            # `x: int = Field(default=1, ge=0)` keeps pydantic's record where 1 would stand.
            default = getattr(field.default, "default", field.default)
            if is_foreign(name) and value != default and value is not None:
                raise no_meaning(name, value)

    def _refuse_other_formats(self) -> None:
        """What was checked here is the heads' safetensors; a worker may load nothing else."""
        found = "auto" if self.draft_load_config is None else self.draft_load_config.load_format
        if found not in HEADS_FORMATS:
            raise HeadsError(
                f"draft_load_config: found load_format {shown(found)}; heads are loaded from "
                f"safetensors only: expected {', '.join(HEADS_FORMATS)}, or leave it out"
            )

    def _refuse_stages(self) -> None:
        """0.29's V2 answers wrongly with stages beside drafts; V1 has no stages in any release."""
        stages = self.target_parallel_config.pipeline_parallel_size
        if stages > 1 and is_release(vllm_version(), "<0.32"):
            raise HeadsError(
                f"pipeline_parallel_size: found {stages}; bpd serves several stages from vLLM 0.32 "
                f"on, and this is {vllm_version()}; use tensor parallelism, or a newer vLLM"
            )

    def _check_schedule(self) -> None:
        """The engine checks a dynamic schedule only after the weights are loaded."""
        schedule = self.num_speculative_tokens_per_batch_size
        if schedule is None:
            return
        try:
            parsed = validate_and_normalize_dynamic_sd_schedule(schedule)
        except (TypeError, ValueError) as error:
            raise HeadsError(
                f"num_speculative_tokens_per_batch_size: found {shown(schedule)}; {error}"
            ) from None
        most = max(drafts for _, _, drafts in parsed)
        if most > self.num_speculative_tokens:
            raise HeadsError(
                f"num_speculative_tokens_per_batch_size: found {shown(most)} drafts; "
                f"num_speculative_tokens is {self.num_speculative_tokens}; give at most that many"
            )

    def _take_heads(self, found: FoundHeads) -> None:
        heads = found.config
        most = heads.max_drafts if self.context_lookup else heads.num_draft_heads
        if self.num_speculative_tokens is None:
            self.num_speculative_tokens = most
        elif self.num_speculative_tokens > most:
            asked = shown(self.num_speculative_tokens)
            drafts = f"has {heads.num_draft_heads} heads"
            if most > heads.num_draft_heads:
                drafts += f" and a lattice of {most} places"
            more = "or train more"
            if heads.max_drafts > most:
                more = f"or up to {heads.max_drafts} with context_lookup: true"
            raise HeadsError(
                f"num_speculative_tokens: found {asked}; the checkpoint in "
                f"{found.folder} {drafts}; give at most {most}, {more}"
            )
        self._check_schedule()
        target = self.target_model_config
        self.model = str(found.folder)
        self.provenance = provenance(found.folder)
        self.draft_model_config = ModelConfig(
            model=self.model,
            runner="draft",
            tokenizer=target.tokenizer,
            tokenizer_mode=target.tokenizer_mode,
            skip_tokenizer_init=target.skip_tokenizer_init,
            dtype=target.dtype,
            seed=target.seed,
            enforce_eager=target.enforce_eager,
            spec_target_max_model_len=target.max_model_len,
            # vLLM wants attention heads that divide evenly among the ranks; ours has none.
            hf_overrides={"num_attention_heads": self.target_parallel_config.tensor_parallel_size},
        )
        # V1 drafts nothing for a whole batch if one request is within a block of the drafter's
        # limit. Heads have no positions, hence no limit; the scheduler cuts at the target's.
        self.draft_model_config.max_model_len = target.max_model_len + self.num_speculative_tokens
        tensor_parallel = self.target_parallel_config.tensor_parallel_size
        if self.draft_tensor_parallel_size not in (None, tensor_parallel):
            asked = shown(self.draft_tensor_parallel_size)
            raise HeadsError(
                f"draft_tensor_parallel_size: found {asked}; heads share the target's vocabulary "
                f"projection, hence its {tensor_parallel}; leave it out"
            )
        self.draft_tensor_parallel_size = tensor_parallel
        self.draft_parallel_config = SpeculativeConfig.create_draft_parallel_config(
            self.target_parallel_config, tensor_parallel
        )


# Of the sources as they were when the first config left, however often one leaves.
_build = functools.cache(plugin_build)


def is_foreign(name: str) -> bool:
    """Whether `name` is a field of SpeculativeConfig that belongs to other methods."""
    return name in SpeculativeConfig.__dataclass_fields__ and name not in _OUR_FIELDS


def no_meaning(name: str, value: object) -> HeadsError:
    """What is said of a foreign field that is set."""
    return HeadsError(
        f"{name}: found {shown(value)}; it has no meaning for method bpd; leave it out"
    )


def connect_runners() -> None:
    """Apply `patches.RUNNERS`; a vLLM that differs is refused by name."""
    try:
        install_runners()
    except PatchError as error:
        raise HeadsError(
            f"speculative method bpd: {error}; `vllm-bpd doctor` shows every touched symbol"
        ) from None


def refuse_target(target: ModelConfig) -> None:
    """Raise HeadsError for kinds of target that are not tested with blockwise heads."""
    kinds = {
        "a pooling model": target.runner_type == "pooling",
        "a multimodal model": target.is_multimodal_model,
        "an encoder-decoder model": target.is_encoder_decoder,
        "a hybrid or state-space model": target.is_hybrid or target.is_attention_free,
    }
    for kind, found in kinds.items():
        if found:
            raise HeadsError(
                f"model: {target.model} is {kind}; bpd serves decoder-only text models with "
                "attention; serve it without --speculative-config bpd"
            )
