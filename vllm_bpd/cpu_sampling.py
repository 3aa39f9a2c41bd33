"""Model runner V1 on a CPU: where sampling goes wrong beside any drafter, and where it is slow.

vLLM 0.32 and 0.33 spread each request's temperature, `top_k` and `top_p` over its drafts with a
C++ stand-in for a Triton kernel, which writes into a copy of what it was given: the rows keep
whatever the memory held. A step in which no request has a draft fails on `top_k` alone. And a
prompt with one token left to read that joins running requests is padded with drafts of id -1: the
stand-in for the kernel that verifies takes for their probability what lies before the row in
memory, and may accept one; the answer then begins with a token drawn from the row behind.

And noise is drawn over the vocabulary for every request of a step in which any drafted, those
without a draft to replace included: each of them takes as long as one that has.

Shape suffixes: B requests, N drafts of all of them, K drafts of one at most, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor


def expand_batch_to_tokens(
    original: Callable[..., Tensor],
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """Each request's value of `x` [B] once for each of its drafts, [N], of `x`'s dtype.

    `cu_num_tokens` [B] counts the drafts of each request and those before it; `replace_from` is
    given as `replace_to`. Other devices keep the engine's kernel.
    """
    if x.device.type != "cpu":
        return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
    counts_B = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values_B = torch.where(x == replace_from, replace_to, x)
    return values_B.repeat_interleave(counts_B, output_size=num_tokens)


def apply_sampling_constraints(
    original: Callable[..., Tensor],
    logits: Tensor,
    cu_num_draft_tokens: Tensor,
    sampling_metadata: Any,
) -> Tensor:
    """The logits of all drafts, [N, V], under each request's options; as they are if N is 0."""
    if logits.shape[0] == 0:
        return logits
    return original(logits, cu_num_draft_tokens, sampling_metadata)


def sample_recovered_tokens(
    original: Callable[..., Tensor],
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    sampling_metadata: Any,
    device: torch.device,
    use_fp64_gumbel: bool = False,
) -> Tensor:
    """What stands in for each draft if it is rejected, [N], with noise for who drafted only.

    A seeded request draws what it would draw anyway: its generator moves only if it has drafts.
    """
    who = [row for row, count in enumerate(num_draft_tokens) if count]
    if target_probs.device.type == "cpu" and who and len(who) < len(num_draft_tokens):
        generators = sampling_metadata.generators
        kept = {new: generators[row] for new, row in enumerate(who) if row in generators}
        sampling_metadata = replace(sampling_metadata, generators=kept)
        num_draft_tokens = [num_draft_tokens[row] for row in who]
        cu_num_draft_tokens = cu_num_draft_tokens[who]
    return original(
        max_spec_len,
        num_draft_tokens,
        cu_num_draft_tokens,
        draft_token_ids,
        draft_probs,
        target_probs,
        sampling_metadata,
        device,
        use_fp64_gumbel,
    )


def verify(
    original: Callable[..., Any],
    sampler: Any,
    metadata: Any,
    draft_probs: Tensor | None,
    logits: Tensor,
    sampling_metadata: Any,
) -> Any:
    """What verification gives, with nothing behind a padding draft.

    Id 0 stands in for -1. Whether it is accepted or another token drawn in its place, that token is
    the target's; the rows behind it read -1 as a token, so what they gave is dropped.
    """
    drafts_N = metadata.draft_token_ids
    if drafts_N.device.type != "cpu" or not (drafts_N < 0).any():
        return original(sampler, metadata, draft_probs, logits, sampling_metadata)
    real = replace(metadata, draft_token_ids=drafts_N.clamp(min=0))
    output = original(sampler, real, draft_probs, logits, sampling_metadata)
    start = 0
    for tokens_K1, count in zip(output.sampled_token_ids, metadata.num_draft_tokens, strict=True):
        padding = (drafts_N[start : start + count] < 0).nonzero()
        if len(padding):
            tokens_K1[int(padding[0]) + 1 :] = -1  # as for what was rejected
        start += count
    return output
