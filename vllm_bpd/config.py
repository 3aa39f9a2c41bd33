"""The heads' configuration: what a checkpoint's `config.json` says. Imports no vLLM.

`HeadsConfig` is the strict, frozen record that all code works with. `BpdConfig` is its Hugging
Face face, which vLLM and transformers load by `model_type`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, get_args

from transformers import PretrainedConfig

from vllm_bpd.errors import HeadsError, named, shown

MODEL_TYPE = "bpd"
ARCHITECTURE = "BlockwiseHeadsModel"
FORMAT_VERSION = 1

Activation = Literal["relu", "silu", "gelu"]
Conditioning = Literal["none", "sampled_token"]

# What transformers itself writes into a config.json; read past, never an error.
_BOOKKEEPING = {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version"}

# Sizes beyond it belong to no model, and their product could not be allocated or even shown.
_MOST = 2**31 - 1
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class TargetFingerprint:
    """Which target the heads were trained for: heads of another one draft noise."""

    architecture: str  # the target's `architectures[0]`
    num_hidden_layers: int  # transformer layers
    hidden_size: int  # width of the last hidden state, d
    vocab_size: int  # rows of the LM head
    lm_head_hash: str | None = None  # vllm_bpd.fingerprint.hash_rows of the LM head; None: unknown


@dataclass(frozen=True)
class HeadsConfig:
    """Shape and meaning of one set of blockwise heads (Stern et al. 2018, section 4)."""

    num_draft_heads: int  # extra heads, k - 1
    head_hidden_size: int  # d_ff; the joint hidden layer is num_draft_heads * d_ff wide
    target: TargetFingerprint  # the target they belong to
    activation: Activation = "silu"  # between the two layers
    conditioning: Conditioning = "sampled_token"  # what joins the hidden state: nothing, or the
    # embedding of the token just sampled
    draft_vocab_size: int | None = None  # ids the heads score; None: the whole vocabulary
    lattice_places: int | None = None  # places of the block that vllm_bpd.lattice has weights for,
    # those behind the last head included; None: no lattice, each head's first choice is drafted
    format_version: int = FORMAT_VERSION  # of the checkpoint

    def __post_init__(self) -> None:
        """Refuse values that no heads can have.

        Raises HeadsError naming the field, what was found and what was expected.
        """
        if type(self.format_version) is not int or self.format_version != FORMAT_VERSION:
            raise HeadsError(
                f"format_version: found {shown(self.format_version)}; this vllm-bpd reads "
                f"{FORMAT_VERSION}; export the heads again or install the version that wrote them"
            )
        for name in ("num_draft_heads", "head_hidden_size"):
            _require_positive_int(name, getattr(self, name))
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            _require_positive_int(f"target.{name}", getattr(self.target, name))
        _check_identity(self.target)
        for name, allowed in (("activation", Activation), ("conditioning", Conditioning)):
            if getattr(self, name) not in get_args(allowed):
                raise HeadsError(
                    f"{name}: found {shown(getattr(self, name))}; expected one of "
                    f"{', '.join(get_args(allowed))}"
                )
        if self.lattice_places is not None:
            _require_positive_int("lattice_places", self.lattice_places)
            if self.lattice_places < self.num_draft_heads:
                raise HeadsError(
                    f"lattice_places: found {self.lattice_places}; expected at least "
                    f"num_draft_heads, {self.num_draft_heads}, or null"
                )
        if self.draft_vocab_size is not None:
            _require_positive_int("draft_vocab_size", self.draft_vocab_size)
            if self.draft_vocab_size > self.target.vocab_size:
                raise HeadsError(
                    f"draft_vocab_size: found {self.draft_vocab_size}; expected at most the "
                    f"target's vocab_size {self.target.vocab_size}"
                )

    @property
    def hidden_size(self) -> int:
        """Width of the target's last hidden state, d."""
        return self.target.hidden_size

    @property
    def input_size(self) -> int:
        """Width of what the joint hidden layer reads: d, or 2d with the sampled token."""
        return self.hidden_size * (2 if self.conditioning == "sampled_token" else 1)

    @property
    def joint_hidden_size(self) -> int:
        """Width of the joint hidden layer, (k - 1) * d_ff."""
        return self.num_draft_heads * self.head_hidden_size

    @property
    def max_drafts(self) -> int:
        """Most tokens that can be drafted in one step, by heads and lattice together."""
        return self.lattice_places or self.num_draft_heads

    @property
    def scored_vocab_size(self) -> int:
        """How many token ids the heads score."""
        return self.draft_vocab_size or self.target.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` content, transformers' bookkeeping fields included."""
        return {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadsConfig:
        """Read `config.json` content strictly.

        Raises HeadsError for a missing, unknown or impossible field.
        """
        if values.get("model_type") != MODEL_TYPE:
            raise HeadsError(
                f"model_type: found {shown(values.get('model_type'))}; expected {MODEL_TYPE!r}: "
                "this is not a checkpoint of blockwise heads"
            )
        own = {name: value for name, value in values.items() if name not in _BOOKKEEPING}
        target = own.pop("target", None)
        if not isinstance(target, dict):
            raise HeadsError(
                f"target: found {shown(target)}; expected an object with the fields "
                f"{', '.join(f.name for f in fields(TargetFingerprint))}"
            )
        _check_names("target.", TargetFingerprint, target)
        _check_names("", cls, {**own, "target": target})
        return cls(target=TargetFingerprint(**target), **own)


class BpdConfig(PretrainedConfig):
    """`HeadsConfig` as a Hugging Face config, so that vLLM's own machinery can load it.

    The plain fields are those of `HeadsConfig`; `heads` gives the strict record. vLLM reads
    `hidden_size` and `vocab_size` from here as from any drafter's config.
    """

    model_type = MODEL_TYPE
    # Neither these nor the properties are fields, so that saving writes none of them.
    num_hidden_layers = 0  # of the heads: they have no attention layers
    num_attention_heads = 1  # vLLM divides hidden_size by it; no attention uses it

    def __init__(self, **kwargs: Any) -> None:
        """Take the fields of `config.json`; strictness is `heads`' work, at use."""
        super().__init__(**kwargs)

    @property
    def hidden_size(self) -> int | None:
        """Width of the target's last hidden state; None in a config without fields."""
        return (getattr(self, "target", None) or {}).get("hidden_size")

    @property
    def vocab_size(self) -> int | None:
        """Rows of the target's LM head; None in a config without fields."""
        return (getattr(self, "target", None) or {}).get("vocab_size")

    @property
    def heads(self) -> HeadsConfig:
        """The strict record. Raises HeadsError as `HeadsConfig.from_dict` does."""
        names = [f.name for f in fields(HeadsConfig)]
        found = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return HeadsConfig.from_dict({"model_type": MODEL_TYPE, **found})


def _require_positive_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HeadsError(f"{name}: found {shown(value)}; expected a whole number of at least 1")
    if value > _MOST:
        raise HeadsError(f"{name}: found {shown(value)}; expected at most {_MOST}")


def _check_identity(target: TargetFingerprint) -> None:
    """Refuse an architecture that is no name, and a hash that is none of ours."""
    if not isinstance(target.architecture, str) or not target.architecture:
        raise HeadsError(
            f"target.architecture: found {shown(target.architecture)}; expected a name, such as "
            "LlamaForCausalLM"
        )
    digest = target.lm_head_hash
    if digest is not None and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise HeadsError(
            f"target.lm_head_hash: found {shown(digest)}; expected 64 lower-case hex digits, "
            "or null"
        )


def _check_names(prefix: str, record: type, values: dict[str, Any]) -> None:
    """Refuse names that `record` lacks, and its required ones that `values` lacks."""
    known = [f.name for f in fields(record)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise HeadsError(
                f"{prefix}{named(name)}: unknown field; expected {', '.join(known)}{hint}"
            )
    for field in fields(record):
        if field.default is MISSING and field.name not in values:
            raise HeadsError(f"{prefix}{field.name}: missing; every heads config must give it")
