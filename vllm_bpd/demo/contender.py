"""One engine of the comparison, driven a request at a time and watched step by step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams


@dataclass(frozen=True)
class Answer:
    """One greedy answer and how it came."""

    token_ids: tuple[int, ...]  # of the answer
    blocks: tuple[int, ...]  # tokens that each engine step gave, in order
    seconds: float  # from request to last token


class Contender:
    """An engine in a process of its own, so that two can stand ready and take turns."""

    def __init__(self, name: str, target: str, max_tokens: int, **engine: Any) -> None:
        """Start the engine with `vllm.LLM(target, **engine)`."""
        self.name = name
        self.max_tokens = max_tokens
        self.llm = LLM(
            target, max_num_seqs=8, max_model_len=1024, disable_log_stats=False, **engine
        )
        self._count = 0

    def answer(self, prompt: str) -> Answer:
        """Answer `prompt` greedily with up to `max_tokens` tokens."""
        tokenizer = self.llm.get_tokenizer()
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        engine = self.llm.llm_engine
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        started = time.perf_counter()
        engine.add_request(f"{self.name}-{self._count}", {"prompt_token_ids": ids}, params)
        token_ids: tuple[int, ...] = ()
        blocks = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = tuple(output.outputs[0].token_ids)
                if len(now) > len(token_ids):
                    blocks.append(len(now) - len(token_ids))
                token_ids = now
        return Answer(token_ids, tuple(blocks), time.perf_counter() - started)

    def margin(self, prompt: str, prefix: tuple[int, ...]) -> float:
        """Log-probability gap between this engine's two best tokens behind prompt and prefix."""
        tokenizer = self.llm.get_tokenizer()
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        output = self.llm.generate(
            {"prompt_token_ids": [*ids, *prefix]},
            SamplingParams(temperature=0.0, max_tokens=1, logprobs=2),
            use_tqdm=False,
        )[0]
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        values = sorted((float(entry.logprob) for entry in logprobs[0].values()), reverse=True)
        return values[0] - values[1]

    def counters(self) -> dict[str, Any]:
        """The engine's own speculation counters, by metric name without its prefix."""
        prefix = "vllm:spec_decode_"
        return {
            metric.name.removeprefix(prefix): (
                metric.value if hasattr(metric, "value") else metric.values
            )
            for metric in self.llm.get_metrics()
            if metric.name.startswith(prefix)
        }

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()
