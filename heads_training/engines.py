"""Text by vLLM's offline engine, or by transformers where vLLM is not installed.

Both take token ids and give token ids, the one that ended the text included; in float32 both give
the same greedy ids (`integration_tests/test_training_data.py`).

Shape suffixes: B requests of a batch, L longest of their prompts.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from heads_training.placement import input_device
from heads_training.target import load_causal_lm
from vllm_bpd.errors import HeadsError

logger = logging.getLogger(__name__)

EngineName = Literal["auto", "vllm", "transformers"]
_DEFAULT_LOGPROBS = 20  # the most that vLLM hands out unless told otherwise
_STEP_TOKENS = 4096  # of prompts and answers that a step reads on a CPU, at least


@dataclass(frozen=True)
class Request:
    """One text to go on with. Temperature 0 is greedy."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """What came behind a prompt."""

    token_ids: list[int]  # the stop token included if there was one
    finish_reason: str  # stop, or length for one cut off at its longest


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is built with."""

    folder: Path  # of the model
    dtype: str
    max_model_len: int  # tokens, prompt and answer
    max_num_seqs: int  # requests decoded at once
    stop_ids: tuple[int, ...]
    beams: int = 1
    tensor_parallel: int = 1
    seed: int = 0


class Engine(Protocol):
    """A loaded model that writes text."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order."""
        ...

    def beam_search(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Completion]:
        """The best beam behind each prompt, in order, of `EngineOptions.beams` beams."""
        ...

    def close(self) -> None:
        """Give back memory and processes; the engine is not used afterwards."""
        ...


def open_engine(name: EngineName, options: EngineOptions) -> Engine:
    """The engine called `name`; `auto` is vLLM where it is installed, else transformers.

    Raises HeadsError if the model cannot be loaded with these options.
    """
    if name == "auto":
        name = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    logger.info("engine: %s", name)
    return VllmEngine(options) if name == "vllm" else TransformersEngine(options)


def _cut(ids: Sequence[int], max_tokens: int, stop_ids: tuple[int, ...]) -> Completion:
    """`ids` up to the first stop token and at most `max_tokens`."""
    for count, token in enumerate(ids[:max_tokens], start=1):
        if token in stop_ids:
            return Completion(list(ids[:count]), "stop")
    return Completion(list(ids[:max_tokens]), "length")


def _whole_prompts(max_model_len: int) -> dict[str, Any]:
    """Options of vLLM's with which a CPU reads each prompt in one step; none elsewhere.

    On a CPU, a seeded prompt that is read in two steps ends vLLM's engine (docs/exactness.md).
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    tokens = max(max_model_len, _STEP_TOKENS)
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}


class VllmEngine:
    """vLLM's offline engine, without speculation."""

    def __init__(self, options: EngineOptions) -> None:
        """Start the engine. Raises HeadsError if vLLM is missing or refuses the options."""
        # On a CPU vLLM would else take 92% of the memory for its KV cache. GiB; GPUs ignore it.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        try:
            from vllm import LLM
        except ImportError as error:
            raise HeadsError(
                f"engine: vllm cannot be imported ({error}); install it, or give --engine "
                "transformers"
            ) from None
        self._options = options
        try:
            self._llm = LLM(
                str(options.folder),
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                max_num_seqs=options.max_num_seqs,
                # vLLM's beam search asks for the probabilities of twice as many tokens.
                max_logprobs=max(_DEFAULT_LOGPROBS, 2 * options.beams),
                tensor_parallel_size=options.tensor_parallel,
                seed=options.seed,
                **_whole_prompts(options.max_model_len),
            )
        except ValueError as error:
            reason = next((line for line in str(error).splitlines()[1:] if line.strip()), error)
            raise HeadsError(f"target: vLLM refuses it: {str(reason).strip()}") from None

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Engine`."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p if request.temperature else 1.0,
                max_tokens=request.max_tokens,
                seed=request.seed if request.temperature else None,
                stop_token_ids=list(self._options.stop_ids),
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [
            Completion(list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason))
            for output in outputs
        ]

    def beam_search(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Completion]:
        """See `Engine`. vLLM ends beams at the tokenizer's own stop token only; others cut here."""
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=self._options.beams, max_tokens=max_tokens)
        outputs = self._llm.beam_search(
            [{"prompt_token_ids": ids} for ids in prompts],
            params,
            concurrency_limit=max(1, self._options.max_num_seqs // self._options.beams),
        )
        return [
            _cut(output.sequences[0].tokens[len(ids) :], max_tokens, self._options.stop_ids)
            for ids, output in zip(prompts, outputs, strict=True)
        ]

    def close(self) -> None:
        """See `Engine`. Else its processes hold memory and cores until this one ends."""
        self._llm.llm_engine.engine_core.shutdown()


class TransformersEngine:
    """transformers' batched generation, padded on the left."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the model. Raises HeadsError if transformers cannot, or the context is too short."""
        if options.tensor_parallel != 1:
            raise HeadsError(
                f"tensor_parallel: found {options.tensor_parallel} with engine transformers; "
                "expected 1, or engine vllm"
            )
        self._options = options
        self._model = load_causal_lm(options.folder, options.dtype)
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and options.max_model_len > context:
            raise HeadsError(
                f"max_model_len: found {options.max_model_len}; the target's context is {context} "
                "tokens"
            )

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Engine`. A batch shares one seed: its first request's."""
        found: dict[int, Completion] = {}
        for batch in self._batches(requests):
            first = requests[batch[0]]
            sampling: dict[str, Any] = {"do_sample": False}
            if first.temperature:
                sampling = {
                    "do_sample": True,
                    "temperature": first.temperature,
                    "top_p": first.top_p,
                    "top_k": 0,
                }
            longest = max(requests[i].max_tokens for i in batch)
            prompts = [requests[i].prompt_ids for i in batch]
            with torch.random.fork_rng():
                torch.manual_seed(first.seed)
                texts = self._generate(prompts, longest, sampling)
            for i, ids in zip(batch, texts, strict=True):
                found[i] = _cut(ids, requests[i].max_tokens, self._options.stop_ids)
        return [found[i] for i in range(len(requests))]

    def beam_search(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Completion]:
        """See `Engine`."""
        requests = [Request(ids, max_tokens) for ids in prompts]
        beams = self._options.beams
        found: dict[int, Completion] = {}
        for batch in self._batches(requests, max(1, self._options.max_num_seqs // beams)):
            texts = self._generate(
                [prompts[i] for i in batch], max_tokens, {"do_sample": False, "num_beams": beams}
            )
            for i, ids in zip(batch, texts, strict=True):
                found[i] = _cut(ids, max_tokens, self._options.stop_ids)
        return [found[i] for i in range(len(prompts))]

    def close(self) -> None:
        """See `Engine`."""
        del self._model

    def _batches(self, requests: Sequence[Request], size: int | None = None) -> Iterator[list[int]]:
        """Indices of requests that are sampled alike, of like length, `size` at a time."""
        size = size or self._options.max_num_seqs
        kinds: dict[tuple[float, float], list[int]] = {}
        for i, request in enumerate(requests):
            kinds.setdefault((request.temperature, request.top_p), []).append(i)
        for indices in kinds.values():
            indices.sort(key=lambda i: (requests[i].max_tokens, len(requests[i].prompt_ids)))
            for start in range(0, len(indices), size):
                yield indices[start : start + size]

    def _generate(
        self, prompts: list[list[int]], max_tokens: int, sampling: dict[str, Any]
    ) -> list[list[int]]:
        """Ids behind each prompt, padded at their end once ended."""
        from transformers import GenerationConfig

        longest = max(len(ids) for ids in prompts)
        ids_BL = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask_BL = torch.zeros_like(ids_BL)
        for row, ids in enumerate(prompts):
            ids_BL[row, longest - len(ids) :] = torch.tensor(ids)
            mask_BL[row, longest - len(ids) :] = 1
        stop_ids = list(self._options.stop_ids)
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            eos_token_id=stop_ids or None,
            pad_token_id=stop_ids[0] if stop_ids else 0,
            **sampling,
        )
        device = input_device(self._model)
        with torch.inference_mode():
            whole = self._model.generate(
                input_ids=ids_BL.to(device),
                attention_mask=mask_BL.to(device),
                generation_config=config,
            )
        texts: list[list[int]] = whole[:, longest:].tolist()
        return texts
