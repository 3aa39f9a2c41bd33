"""Model runner V1: drafts after bookkeeping, from the target's last hidden states and the text.

Shape suffixes: R sampled rows, B requests that sampled, D hidden size, K drafts, T rows of the
engine's token table, L its columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vllm_bpd.confidence import schedule
from vllm_bpd.entry import METHOD
from vllm_bpd.tally import Tally

if TYPE_CHECKING:
    from vllm_bpd.model import BlockwiseHeadsModel

PROPOSER = "vllm_bpd.proposer.BpdProposer"
_LLVMLITE_HANDLE = "llvmlite.binding.ffi"  # the module that holds it


@dataclass(frozen=True)
class Texts:
    """The engine's table of what each request of the batch says, prompt and answer."""

    request_ids: Sequence[str]  # one a row
    tokens_TL: NDArray[np.int32]
    lengths_T: NDArray[np.int32]  # tokens of each row, those just sampled included


class BpdProposer:
    """V1's drafter for method `bpd`, built by the engine's `custom_class` branch."""

    def __init__(self, vllm_config: Any) -> None:
        """Keep the config; weights come with `load_model`."""
        self.vllm_config = vllm_config
        self.model: BlockwiseHeadsModel | None = None
        self.tally = Tally()

    @torch.inference_mode()
    def load_model(self, target: nn.Module) -> None:
        """Load the heads and bind them to the loaded `target`."""
        from vllm_bpd.model import load_heads_model

        self.model = load_heads_model(self.vllm_config, target)
        if self.model.lattice_weights_PF is not None:
            self._compile_lattice()

    def _compile_lattice(self) -> None:
        """Draft once for nobody, so that no request waits for the compiler (seconds)."""
        assert self.model is not None
        device = self.vllm_config.device_config.device
        dtype = self.vllm_config.model_config.dtype
        hidden_BD = torch.zeros(1, self.model.config.hidden_size, dtype=dtype, device=device)
        texts = Texts(["none"], np.zeros((1, 2), np.int32), np.ones(1, np.int32))
        sampled_B = torch.zeros(1, dtype=torch.int64, device=device)
        ids_BKM, logp_BKM = self.model.candidates(hidden_BD, sampled_B)
        self._draft_from_lattice([0], ids_BKM, logp_BKM, self.model.places, texts, 0.0)

    @torch.inference_mode()
    def propose(
        self,
        sampled: list[list[int]],
        sampled_states_RD: Tensor,
        num_draft_tokens: Sequence[int] | None,
        num_drafts: int,
        texts: Texts,
        temperature_B: Tensor | None = None,
    ) -> list[list[int]]:
        """Drafts for each request; none for one that sampled nothing (a prefill chunk).

        `sampled` holds the ids each request has just accepted and sampled; `num_draft_tokens`
        how many drafts each had under verification (None: none had any); `temperature_B` is 0
        where a request is greedy (None: all are). With a lattice, a request has fewer drafts
        where more would not be accepted.
        """
        assert self.model is not None, "load_model() comes first"
        self.tally.count_accepted(texts.request_ids, sampled)
        drafts: list[list[int]] = [[] for _ in sampled]
        rows = last_accepted_rows(sampled, num_draft_tokens)
        lowest, by_text_alone, greedy_alone = self._how_sure(len(texts.request_ids))
        if greedy_alone and temperature_B is not None:
            greedy_B = (temperature_B == 0).tolist()
            rows = {i: row for i, row in rows.items() if greedy_B[i]}
        if not rows or num_drafts == 0 or lowest >= 1:
            return drafts
        if self.model.lattice_weights_PF is None:
            if not by_text_alone:
                ids_BK = self.model(*self._inputs(sampled, sampled_states_RD, rows))
                for i, ids in zip(rows, ids_BK[:, :num_drafts].tolist(), strict=True):
                    drafts[i] = ids
            return drafts
        if by_text_alone:
            empty_BKM = torch.empty(len(rows), 0, 0)
            candidates = empty_BKM.long(), empty_BKM
        else:
            candidates = self.model.candidates(*self._inputs(sampled, sampled_states_RD, rows))
        blocks = self._draft_from_lattice(list(rows), *candidates, num_drafts, texts, lowest)
        for i, (ids, from_context) in zip(rows, blocks, strict=True):
            drafts[i] = ids
            self.tally.note_drafts(texts.request_ids[i], from_context)
        return drafts

    def _how_sure(self, batch_size: int) -> tuple[float, bool, bool]:
        """The lowest confidence, and whether so many requests run that the heads rest, and that
        those that sample draft nothing.

        Read anew at every step: `vllm-bpd tune` changes it between runs.
        """
        assert self.model is not None
        speculative = self.vllm_config.speculative_config
        wanted = schedule(
            speculative.min_confidence_per_batch_size,
            speculative.min_confidence,
            self.vllm_config.device_config.device_type,
        )
        most: int | None = speculative.heads_up_to_batch_size
        if most is None and self.model.lattice_weights_PF is not None:
            most = wanted.heads_up_to
        sampled = wanted.sampled_up_to
        return (
            wanted.at(batch_size),
            most is not None and batch_size > most,
            sampled is not None and batch_size > sampled,
        )

    @staticmethod
    def _inputs(
        sampled: list[list[int]], sampled_states_RD: Tensor, rows: dict[int, int]
    ) -> tuple[Tensor, Tensor]:
        """What the heads read: last hidden states [B, D] and ids just sampled [B]."""
        device = sampled_states_RD.device
        hidden_BD = sampled_states_RD[torch.tensor(list(rows.values()), device=device)]
        return hidden_BD, torch.tensor([sampled[i][-1] for i in rows], device=device)

    def _draft_from_lattice(
        self,
        requests: list[int],
        ids_BKM: Tensor,
        logp_BKM: Tensor,
        num_drafts: int,
        texts: Texts,
        lowest_confidence: float,
    ) -> list[tuple[list[int], list[bool]]]:
        """Ids, and which came from the text, for each of `requests`; as few as are worth it."""
        from vllm_bpd.lattice_host import draft_blocks

        assert self.model is not None
        assert self.model.lattice_weights_PF is not None
        speculative = self.vllm_config.speculative_config
        rows = np.array(requests)
        ids_BP, counts_B, from_context_BP = draft_blocks(
            texts.tokens_TL,
            rows,
            texts.lengths_T[rows].astype(np.int64),
            ids_BKM.cpu().numpy(),
            logp_BKM.cpu().numpy(),
            self.model.lattice_weights_PF.numpy()[:num_drafts],
            speculative.context_window if speculative.context_lookup else 0,
            lowest_confidence,
        )
        return [
            (ids[:count], from_context[:count])
            for ids, count, from_context in zip(
                ids_BP.tolist(), counts_B.tolist(), from_context_BP.tolist(), strict=True
            )
        ]


def last_accepted_rows(
    sampled: list[list[int]], num_draft_tokens: Sequence[int] | None
) -> dict[int, int]:
    """Request index -> row of its last accepted position, for requests that sampled.

    A request under verification owns `drafts + 1` consecutive rows; row j scores the token behind
    its j-th draft, so the last of n sampled tokens came from row n - 1.
    """
    rows, offset = {}, 0
    for i, tokens in enumerate(sampled):
        if tokens:
            rows[i] = offset + len(tokens) - 1
        offset += 1 + (num_draft_tokens[i] if num_draft_tokens is not None else 0)
    return rows


def init_runner(original: Callable[..., None], runner: Any, vllm_config: Any, device: Any) -> None:
    """Let the runner's closed if/elif build `BpdProposer` through its `custom_class` branch."""
    speculative = vllm_config.speculative_config
    if getattr(speculative, "method", None) != METHOD:
        original(runner, vllm_config, device)
        return
    heads = speculative.model
    speculative.method, speculative.model = "custom_class", PROPOSER
    try:
        original(runner, vllm_config, device)
    finally:
        speculative.method, speculative.model = METHOD, heads


def register_kernels(original: Callable[..., None], overrides: Any) -> None:
    """Let a second engine start in a process where numba is loaded (by us, or by `ngram`).

    The engine asks `vars(value).get` of every value in every module; llvmlite's library handle
    answers any attribute with a C function.
    """
    handle = sys.modules.pop(_LLVMLITE_HANDLE, None)
    try:
        original(overrides)
    finally:
        if handle is not None:
            sys.modules[_LLVMLITE_HANDLE] = handle


def propose_draft_token_ids(
    original: Callable[..., Any],
    runner: Any,
    scheduler_output: Any,
    sampled_token_ids: Any,
    sampling_metadata: Any,
    hidden_states: Tensor,
    sample_hidden_states: Tensor,
    aux_hidden_states: Any,
    spec_decode_metadata: Any,
    common_attn_metadata: Any,
    slot_mappings: Any,
) -> Any:
    """Draft with the heads for method `bpd`; pass everything on for the others."""
    if not isinstance(getattr(runner, "drafter", None), BpdProposer):
        return original(
            runner,
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            common_attn_metadata,
            slot_mappings,
        )
    num_draft_tokens = None
    if spec_decode_metadata is not None:
        num_draft_tokens = spec_decode_metadata.num_draft_tokens
    runner._draft_probs = None
    runner._draft_prob_req_ids = None
    return runner.drafter.propose(
        sampled_token_ids,
        sample_hidden_states,
        num_draft_tokens,
        scheduler_output.num_spec_tokens_to_schedule,
        Texts(
            runner.input_batch.req_ids,
            runner.input_batch.token_ids_cpu,
            runner.input_batch.num_tokens_no_spec,
        ),
        sampling_metadata.temperature,
    )
