"""Inside an engine process: requests one by one, each with its own options, and all they give.

A request is a dict: `prompt` (token ids), `sampling` (SamplingParams arguments, where
`structured_outputs` is a dict, which may have `tools` and `tool_choice` as the OpenAI API has
them), and optionally `lora` (a name and folder), and `abort_after`: it is dropped by its client
once that many tokens have come.
"""

from __future__ import annotations

from typing import Any


def sampling_params(arguments: dict[str, Any]) -> Any:
    """`SamplingParams` from plain data."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if "logit_bias" in arguments:  # JSON has no numbers for keys
        biases = {int(token): bias for token, bias in arguments["logit_bias"].items()}
        arguments = {**arguments, "logit_bias": biases}
    structure = arguments.get("structured_outputs")
    if structure is not None:
        if "tools" in structure:
            structure = {"json": tool_schema(**structure)}
        arguments = {**arguments, "structured_outputs": StructuredOutputsParams(**structure)}
    return SamplingParams(**arguments)


def tool_schema(tools: list[dict[str, Any]], tool_choice: Any) -> Any:
    """The schema that the server makes of a request's tools."""
    from vllm.entrypoints.openai.chat_completion import protocol
    from vllm.tool_parsers.utils import get_json_schema_from_tools

    if not isinstance(tool_choice, str):
        tool_choice = protocol.ChatCompletionNamedToolChoiceParam(**tool_choice)
    made = [protocol.ChatCompletionToolsParam(**tool) for tool in tools]
    return get_json_schema_from_tools(tool_choice=tool_choice, tools=made)


def plain_rows(rows: Any) -> list[dict[str, Any] | None] | None:
    """Logprobs as plain data: for each token a dict of token id to [logprob, rank]."""
    if rows is None:
        return None
    return [
        row and {str(token): [entry.logprob, entry.rank] for token, entry in row.items()}
        for row in rows
    ]


def describe(output: Any) -> dict[str, Any]:
    """Everything a client sees of one finished request."""
    return {
        "completions": [
            {
                "token_ids": list(completion.token_ids),
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "logprobs": plain_rows(completion.logprobs),
            }
            for completion in sorted(output.outputs, key=lambda one: one.index)
        ],
        "prompt_logprobs": plain_rows(output.prompt_logprobs),
        "cached": output.num_cached_tokens,
    }


class Drive:
    """The requests of one batch, driven through an in-process engine step by step."""

    def __init__(self, llm: Any, batch: dict[str, Any]) -> None:
        """Remember the engine; nothing is sent yet."""
        self.engine = llm.llm_engine
        self.requests: list[dict[str, Any]] = batch["requests"]
        self.results: list[dict[str, Any]] = [{} for _ in self.requests]
        # The engine may give a request another id, so results are found by ours through this.
        self.places: dict[str, int] = {}

    def send(self, place: int) -> None:
        """Add one request; a refusal is its result."""
        from vllm.exceptions import VLLMClientError
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        request = self.requests[place]
        lora = request.get("lora")
        prompt = {"prompt_token_ids": request["prompt"]}
        try:
            params = sampling_params(request["sampling"])
            if request.get("abort_after") is None:
                params.output_kind = RequestOutputKind.FINAL_ONLY
            adapter = None if lora is None else LoRARequest(lora["name"], lora["id"], lora["path"])
            given = self.engine.add_request(str(place), prompt, params, lora_request=adapter)
            self.places[str(place)] = self.places[str(given)] = place
        except (ValueError, VLLMClientError) as error:
            self.results[place] = {"refused": str(error)}

    def take(self, output: Any) -> None:
        """Note what came for a request, and drop it if its client does so here."""
        place = self.places[output.request_id]
        if output.finished:
            self.results[place] = describe(output)
            return
        limit = self.requests[place].get("abort_after")
        come = len(output.outputs[0].token_ids) if output.outputs else 0
        if limit is not None and come >= limit:
            self.engine.abort_request([output.request_id])
            self.results[place] = {"aborted": come}

    def run(self) -> list[dict[str, Any]]:
        """Send all, step until none is left, and give the results in the requests' order."""
        for place in range(len(self.requests)):
            self.send(place)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self.take(output)
        return self.results


def gauges(llm: Any) -> dict[str, float]:
    """The engine's counters and gauges by name, without the speculative ones."""
    wanted = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:kv_cache_usage_perc",
              "vllm:num_requests_running", "vllm:num_requests_waiting")  # fmt: skip
    return {m.name: float(m.value) for m in llm.get_metrics() if m.name in wanted}


def beam(llm: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Beam search over each prompt: token ids and cumulative logprob of every beam."""
    from vllm.sampling_params import BeamSearchParams

    prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
    results = llm.beam_search(prompts, BeamSearchParams(**batch["beam"]))
    return [
        {"beams": [[list(one.tokens), one.cum_logprob] for one in result.sequences]}
        for result in results
    ]
