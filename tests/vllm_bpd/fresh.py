"""What runs in processes of its own, forked from one that imported this and replaced nothing."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import vllm.engine.arg_utils
import vllm.v1.worker.gpu.model_runner
import vllm.v1.worker.gpu.states
import vllm.v1.worker.gpu_model_runner

import vllm_bpd.model  # noqa: F401

TIMEOUT = 300


def run_fresh(
    context: ForkServerContext, work: Callable[..., Any], *arguments: tuple[Any, ...]
) -> list[Any]:
    """What `work` returns for each tuple of arguments, each called in a process of its own.

    All run at once. Raises AssertionError if one fails, or takes too long.
    """
    started = []
    for each in arguments:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_call, args=(theirs, work, pickle.dumps(each)))
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        results = []
        for _, ours in started:
            assert ours.poll(TIMEOUT), f"{work.__name__} took more than {TIMEOUT} s"
            done, value = pickle.loads(ours.recv_bytes())
            assert done, value
            results.append(value)
        return results
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _call(connection: Connection, work: Callable[..., Any], arguments: bytes) -> None:
    # Pickled here: `send` would leave tensors in the memory of a process that may be gone.
    try:
        result = (True, work(*pickle.loads(arguments)))
    except BaseException:
        result = (False, traceback.format_exc())
    connection.send_bytes(pickle.dumps(result))


def row_states() -> list[tuple[str, bool, str]]:
    """Each row of the table on the installed vLLM: symbol, usable, what was found."""
    from vllm_bpd import patches
    from vllm_bpd.patching import state

    version = patches.vllm_version()
    rows = patches.for_release((*patches.ENTRY, *patches.RUNNERS), version)
    return [(row.symbol, *state(row, version)) for row in rows]


def replaced_by(step: str) -> tuple[list[str], bool]:
    """Symbols that `register` replaces, or with `runners` that a config then does, of our table;
    and whether a second time changes nothing."""
    import vllm_bpd
    from vllm_bpd import patches

    def symbols() -> dict[str, Any]:
        found = {}
        rows = (*patches.ENTRY, *patches.RUNNERS)
        for row in patches.for_release(rows, patches.vllm_version()):
            owner: Any = __import__(row.module, fromlist=["_"])
            for part in row.attribute.split("."):
                owner = getattr(owner, part)
            found[row.symbol] = owner
        return found

    def install() -> None:
        vllm_bpd.register()
        if step == "runners":
            patches.install_runners()

    before = symbols()
    install()
    after = symbols()
    install()
    return [name for name in before if before[name] != after[name]], symbols() == after


def refused(how: str, target: str, heads: str) -> dict[str, str]:
    """What is said where vLLM is not as expected, `how` tells in what; other methods must work."""
    import vllm_bpd
    from vllm_bpd import patches

    engine_args: Any = vllm.engine.arg_utils
    if how == "version":
        patches.vllm_version = lambda: "0.99.0"
    elif how == "entry signature":
        original = engine_args.EngineArgs.create_engine_config

        def create_engine_config(self: Any, usage_context: Any = None, extra: Any = None) -> Any:
            return original(self, usage_context)

        engine_args.EngineArgs.create_engine_config = create_engine_config
    elif how == "runner signature":
        runner: Any = vllm.v1.worker.gpu.model_runner

        def init_speculator(vllm_config: Any) -> None:
            raise AssertionError(f"called with {vllm_config}")

        runner.init_speculator = init_speculator
    elif how == "instance attribute":
        states: Any = vllm.v1.worker.gpu.states

        class RequestState:
            def __init__(self) -> None:
                self.all_token_ids: list[int] = []

        states.RequestState = RequestState
    elif how == "options":
        patches.vllm_version = lambda: "0.10.0"
        engine_args.EngineArgs.add_cli_args = staticmethod(lambda parser: parser)

    vllm_bpd.register()
    vllm_bpd.register()
    return _attempts(target, heads)


def _attempts(target: str, heads: str) -> dict[str, str]:
    """What each way of asking for `bpd` says; asserts that n-gram drafting still works."""
    from vllm import EngineArgs
    from vllm.config import SpeculativeConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def arguments(speculative: Any) -> Any:
        return EngineArgs(
            model=target, skip_tokenizer_init=True, enforce_eager=True,
            speculative_config=speculative,
        )  # fmt: skip

    said = {}
    for name, speculative in {"word": "bpd", "dict": {"method": "bpd", "model": heads}}.items():
        said[name] = _refusal(arguments(speculative).create_engine_config)
    said["config"] = _refusal(lambda: SpeculativeConfig(method="bpd", num_speculative_tokens=2))
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    made = arguments(ngram).create_engine_config().speculative_config
    assert type(made) is SpeculativeConfig
    assert type(SpeculativeConfig(**ngram)) is SpeculativeConfig
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    if "--speculative-config" in parser._option_string_actions:
        parsed = parser.parse_args(["--model", target, "--speculative-config", "bpd"])
        assert parsed.speculative_config == {"method": "bpd"}
        sys.argv[0] = "/venv/bin/vllm"
        said["command line"] = _refusal(arguments(parsed.speculative_config).create_engine_config)
    return said


def _refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def unpickled(pickled: bytes) -> tuple[str, int, bool]:
    """Type and drafts of a pickled config, and whether it connected the runners of this process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert not hasattr(GPUModelRunner.__init__, "__bpd_patch__")
    made = pickle.loads(pickled)
    connected = hasattr(GPUModelRunner.__init__, "__bpd_patch__")
    return type(made).__name__, made.num_speculative_tokens, connected


_KEPT: list[Any] = []


def join_group(rank: int, size: int, folder: str) -> None:
    """Make this process rank `rank` of `size` in a tensor-parallel gloo group, for good."""
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Names the shared memory of a CPU group; as a rule the engine does that.
    os.environ["VLLM_DIST_IDENT"] = sha256(folder.encode()).hexdigest()[:16]
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=size))
    context = set_current_vllm_config(config)
    context.__enter__()
    _KEPT.append(context)  # it would end if it were collected
    meeting = f"file://{Path(folder) / 'meeting'}"
    init_distributed_environment(size, rank, meeting, rank, "gloo")
    initialize_model_parallel(size)


def loaded(module: Any) -> Any:
    """`module` after what vLLM's loader does to each layer once its weights are there."""
    for layer in module.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
    return module


def lm_head_for(matrix_VD: torch.Tensor, bias_V: torch.Tensor | None = None) -> Any:
    """vLLM's LM head over `matrix_VD`, this rank's shard of it, padded as vLLM pads."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    rows, width = matrix_VD.shape
    head = ParallelLMHead(rows, width, bias=bias_V is not None, params_dtype=matrix_VD.dtype)
    head.weight_loader(head.weight, matrix_VD)
    real = head.shard_indices.num_org_elements
    head.weight.data[real:] = 1e4  # padding that would win if it were ever scored
    if bias_V is not None:
        head.weight_loader(head.bias, bias_V)
        head.bias.data[real:] = 1e4
    return loaded(head)


def projected(
    matrix_VD: torch.Tensor,
    states_ND: torch.Tensor,
    ids_V: torch.Tensor | None,
    bias_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the projection chooses on this rank: the best ids, and candidates with probabilities."""
    from torch import nn

    from vllm_bpd.lattice import CANDIDATES
    from vllm_bpd.projection import DraftProjection

    target = nn.Module()
    target.lm_head = lm_head_for(matrix_VD, bias_V)
    projection = DraftProjection(target, ids_V)
    ids_NM, logp_NM = projection.top_candidates(states_ND, CANDIDATES)
    return projection.top_tokens(states_ND).clone(), ids_NM.clone(), logp_NM.clone()


def projected_on_rank(
    rank: int, size: int, folder: str, cases: list[tuple[Any, ...]]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`projected` of every case on one rank of a group."""
    join_group(rank, size, folder)
    return [projected(*case) for case in cases]


def head_states_on_rank(
    rank: int, size: int, folder: str, cases: list[tuple[Any, ...]]
) -> list[tuple[str, torch.Tensor]]:
    """Kind of the hidden layer and all head states, of every case, on one rank of a group.

    A case is a config, its tensors, how many heads, hidden states and embeddings.
    """
    from types import SimpleNamespace

    from vllm_bpd.model import BlockwiseHeadsModel

    join_group(rank, size, folder)
    results = []
    for config, tensors, count, hidden_BD, embedding_BD in cases:
        speculative = SimpleNamespace(
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(heads=config)),
            num_speculative_tokens=count,
        )
        wanted: Any = SimpleNamespace(speculative_config=speculative)
        model = BlockwiseHeadsModel(vllm_config=wanted)
        model.load_weights(tensors.items())
        loaded(model)
        with torch.no_grad():
            states_BKD = model.heads(hidden_BD, embedding_BD)
        results.append((type(model.heads.hidden_layer).__name__, states_BKD.clone()))
    return results


def load_refusals(
    rank: int, size: int, folder: str, config: Any, cases: list[dict[str, torch.Tensor]]
) -> list[str]:
    """What loading each of these sets of tensors says."""
    from types import SimpleNamespace

    from vllm_bpd.model import BlockwiseHeadsModel

    join_group(rank, size, folder)
    speculative = SimpleNamespace(
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(heads=config)),
        num_speculative_tokens=config.num_draft_heads,
    )
    wanted: Any = SimpleNamespace(speculative_config=speculative)
    said = []
    for tensors in cases:
        model = BlockwiseHeadsModel(vllm_config=wanted)
        said.append(_refusal(lambda: model.load_weights(tensors.items())))  # noqa: B023
    return said


def signature_of(reference: str) -> inspect.Signature:
    """The signature of a replacement named `module:function`."""
    module, name = reference.split(":")
    return inspect.signature(getattr(__import__(module, fromlist=["_"]), name))


def _noting(seen: list[Any], name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective`, which notes its name and its tensor's shape first."""

    def noting(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        seen.append((name, tuple(tensor.shape)))
        return collective(tensor, *rest, **named)

    return noting


def drafted_on_rank(
    rank: int, size: int, folder: str, case: dict[str, Any], steps: list[dict[str, Any]]
) -> list[tuple[Any, list[tuple[str, tuple[int, ...]]]]]:
    """What one rank drafts in each step, and the collectives it took part in, with their shapes.

    A case has a heads' `config`, its `tensors`, the target's `lm_head` and `embedding`. A step
    calls the model's `forward` or `candidates`, or the V1 drafter's `propose`, with `arguments`.
    """
    from types import SimpleNamespace

    from torch import nn
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from vllm_bpd.model import BlockwiseHeadsModel
    from vllm_bpd.proposer import BpdProposer

    join_group(rank, size, folder)
    config = case["config"]
    speculative = SimpleNamespace(
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(heads=config)),
        num_speculative_tokens=case["places"],
        context_lookup=True,
        context_window=64,
        min_confidence=0.0,
        min_confidence_per_batch_size=None,
        heads_up_to_batch_size=case["heads_up_to"],
    )
    target: Any = nn.Module()
    target.lm_head = lm_head_for(case["lm_head"])
    table = VocabParallelEmbedding(*case["embedding"].shape, params_dtype=torch.float32)
    table.weight_loader(table.weight, case["embedding"])
    target.embed_input_ids = loaded(table)
    cpu = SimpleNamespace(device_type="cpu")
    wanted: Any = SimpleNamespace(speculative_config=speculative, device_config=cpu)
    drafter = BpdProposer(wanted)
    drafter.model = BlockwiseHeadsModel(vllm_config=wanted)
    drafter.model.load_weights(case["tensors"].items())
    loaded(drafter.model).bind(target)
    seen: list[tuple[str, tuple[int, ...]]] = []
    group = get_tp_group()
    for name in ("all_reduce", "all_gather"):
        setattr(group, name, _noting(seen, name, getattr(group, name)))
    results = []
    for step in steps:
        owner = drafter if step["call"] == "propose" else drafter.model
        with torch.inference_mode():
            found = getattr(owner, step["call"])(*step["arguments"])
        results.append((pickle.loads(pickle.dumps(found)), list(seen)))
        seen.clear()
    return results


def embedded_on_rank(
    rank: int, size: int, folder: str, target: str, ids: list[int], download_dir: str | None = None
) -> Any:
    """What the embedding of a stage that lacks one gives for `ids`, and a stage's placeholder."""
    from types import SimpleNamespace

    from vllm.model_executor.models.utils import PPMissingLayer

    from vllm_bpd.stage_embedding import is_missing, load_embedding

    join_group(rank, size, folder)
    shape = {"get_vocab_size": lambda: 131, "get_hidden_size": lambda: 16}
    device = torch.device("cpu")
    wanted: Any = SimpleNamespace(
        model_config=SimpleNamespace(model=target, revision=None, dtype=torch.float32, **shape),
        device_config=SimpleNamespace(device=device),
        load_config=SimpleNamespace(load_format="auto", download_dir=download_dir),
    )
    table = load_embedding(wanted)
    missing = is_missing(PPMissingLayer(), device), is_missing(table, device)
    return table(torch.tensor(ids)).clone(), missing
