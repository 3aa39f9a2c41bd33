"""Stand-in drafting inside an engine process: recorded text in place of what heads would draft.

Two sources can be stood in for. `stock` drafts through the engine's own outside doors (a
`custom_class` proposer on V1, a speculator put in for `ngram_gpu` on V2) and needs no plugin: it
proves the harness and the hand count. `plugin` replaces only what the plugin's heads compute, so
that everything else of the plugin's path runs, and checks what the heads are given.

A stand-in finds each request's place in its recording from the whole token row the model runner
keeps for it, prompt included, so a wrong row or a stale token shows as a wrong draft.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from integration_tests.harness.oracle import (
    Recording,
    chain,
    continuation,
    find_recording,
    runs_past,
)

STOCK_V1 = {
    "method": "custom_class",
    "model": "integration_tests.harness.stand_ins.StockProposer",
}
STOCK_V2 = {"method": "ngram_gpu", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# The release whose model runner V2 takes no such method.
NO_STOCK_V2 = "0.29"


# The modes of a batch that draft recorded text, and which drafts are wrong in them.
CORRUPT_EVERY = {"oracle": None, "corrupted": 3}


class Script:
    """What to draft: the recordings, the batch's mode, and the runner to read rows from."""

    def __init__(self) -> None:
        """Begin with nothing recorded and no runner followed."""
        self.recordings: list[Recording] = []
        self.mode = "heads"
        self.runner: Any = None
        self.rows: list[list[int]] = []
        self.faults: list[str] = []
        self.processors = False
        self.highest = -1  # of all ids that heads have drafted in this batch
        # What the heads themselves have drafted in it: a request's tokens so far, and the drafts.
        self.blocks: list[tuple[list[int], list[int]]] = []
        self.successors: list[list[int]] = []  # of each token: the likeliest, and the least likely

    def begin(self, mode: str, processors: bool = False) -> None:
        """Start a batch that drafts as `mode` says.

        With `processors` more than the target's logits decides a token (penalties, grammars), so
        the hidden state alone does not tell which one was sampled.
        """
        if mode not in ("heads", *CORRUPT_EVERY):
            raise ValueError(f"drafts: found {mode!r}")
        self.mode = mode
        self.highest = -1
        self.blocks = []
        self.processors = processors
        self.faults = []

    def check(self, prefix: list[int], from_hidden: int, sampled: int) -> None:
        """Note a fault unless the heads were given the right inputs for the request at `prefix`.

        The token they are told was sampled must be its last, and under greedy decoding the
        hidden state they are given must be the one the target sampled that token from.
        """
        if self.successors:
            if prefix[-1] != sampled:
                self.faults.append(f"the heads were told {sampled}, the last one is {prefix[-1]}")
            return
        recording = find_recording(prefix, self.recordings)
        if recording is None and runs_past(prefix, self.recordings):
            return  # asynchronously, a step is under way when its request is found to have ended
        if recording is None:
            self.faults.append(f"no recording begins with {prefix}")
        elif len(prefix) <= len(recording.prompt):
            return
        elif prefix[-1] != sampled or (from_hidden != sampled and not self.processors):
            self.faults.append(
                f"at token {len(prefix)}: the last one is {prefix[-1]}, the heads were told "
                f"{sampled}, and their hidden state gives {from_hidden}"
            )

    def drafts(self, prefix: list[int], count: int) -> list[int]:
        """The drafts for a request whose tokens so far are `prefix`."""
        if self.successors:
            return chain(prefix, self.successors, count, CORRUPT_EVERY[self.mode])
        return continuation(prefix, self.recordings, count, CORRUPT_EVERY[self.mode])


SCRIPT = Script()


class StockProposer:
    """A V1 `custom_class` proposer that drafts from the script."""

    def __init__(self, vllm_config: Any) -> None:
        """Note how many tokens to draft."""
        self.count = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """Nothing to load."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: Any, token_ids: Any, **_: Any
    ) -> list[list[int]]:
        """Draft for every request that sampled; none for a prefill still under way."""
        return [
            SCRIPT.drafts(token_ids[row, : num_tokens[row]].tolist(), self.count) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]


def v2_rows(runner: Any, input_batch: Any) -> list[list[int]]:
    """The whole token row of each request of a V2 batch, the tokens just sampled included."""
    states = runner.req_states
    slots = input_batch.idx_mapping[: input_batch.num_reqs].tolist()
    lengths = states.total_len.gpu[slots].tolist()
    return [
        states.all_token_ids.gpu[slot, :length].tolist()
        for slot, length in zip(slots, lengths, strict=True)
    ]


def v1_rows(runner: Any) -> list[list[int]]:
    """The whole token row of each request of a V1 batch, the tokens just sampled included."""
    batch = runner.input_batch
    return [
        batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist()
        for row in range(batch.num_reqs)
    ]


def stock_speculator(vllm_config: Any, *_: Any) -> Any:
    """A V2 speculator that drafts from the script, made where the engine makes its own."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class StockSpeculator(BaseSpeculator):  # type: ignore[misc]
        """Drafts recorded text; has no model and no graphs."""

        supports_mm_inputs = False
        draft_logits = None

        def __init__(self) -> None:
            """Note how many tokens to draft."""
            self.count = vllm_config.speculative_config.num_speculative_tokens

        def init_cudagraph_manager(self, *_: Any) -> None:
            """Nothing to capture."""

        def capture(self, *_: Any, **__: Any) -> None:
            """Nothing to capture."""

        def propose(self, input_batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> Any:
            """Draft for every request of the batch."""
            if dummy_run or SCRIPT.runner is None:
                return torch.zeros(input_batch.num_reqs, self.count, dtype=torch.int64)
            rows = v2_rows(SCRIPT.runner, input_batch)
            return torch.tensor([SCRIPT.drafts(row, self.count) for row in rows])

    return StockSpeculator()


@contextmanager
def stock_installed() -> Iterator[None]:
    """Put the stock V2 speculator in the engine's place for `ngram_gpu`."""
    import vllm.v1.worker.gpu.model_runner as v2

    original = v2.init_speculator
    v2.init_speculator = stock_speculator
    try:
        yield
    finally:
        v2.init_speculator = original


@contextmanager
def installed(drafts: dict[str, Any]) -> Iterator[None]:
    """Install the stand-in that a job's `drafts` names, until the job ends.

    `drafts` has `source` (`stock` or `plugin`) and `recordings` (a list of `[prompt, answer]`), or
    `successors` where answers are sampled: for each token its likeliest and least likely successor.
    """
    SCRIPT.recordings = [Recording(prompt, answer) for prompt, answer in drafts["recordings"]]
    SCRIPT.successors = drafts.get("successors", [])
    if drafts["source"] == "plugin":
        with plugin_installed():
            yield
    elif os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        with stock_installed():
            yield
    else:
        yield


@contextmanager
def plugin_installed() -> Iterator[None]:
    """Replace what the plugin's heads compute with the script's drafts, rows checked.

    Only `BlockwiseHeadsModel.forward` is replaced. The two `propose` methods are wrapped to note
    which request each of its rows belongs to, and are otherwise left to run.
    """
    from vllm_bpd.model import BlockwiseHeadsModel
    from vllm_bpd.proposer import BpdProposer

    patched = [
        (BlockwiseHeadsModel, "forward", scripted_forward(BlockwiseHeadsModel.forward)),
        (BpdProposer, "propose", noting_v1_rows(BpdProposer.propose)),
    ]
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from vllm_bpd.speculator import BpdSpeculator

        patched.append((BpdSpeculator, "propose", noting_v2_rows(BpdSpeculator.propose)))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, replacement in patched:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def noting_v1_rows(propose: Any) -> Any:
    """`BpdProposer.propose`, noting the token row of each request that sampled."""

    def wrapped(self: Any, sampled: list[list[int]], *rest: Any, **named: Any) -> Any:
        if SCRIPT.runner is not None:
            rows = v1_rows(SCRIPT.runner)
            SCRIPT.rows = [rows[i] for i, tokens in enumerate(sampled) if tokens]
        return propose(self, sampled, *rest, **named)

    return wrapped


def noting_v2_rows(propose: Any) -> Any:
    """`BpdSpeculator.propose`, noting the token row of each request of the batch."""

    def wrapped(self: Any, input_batch: Any, *rest: Any, **named: Any) -> Any:
        if SCRIPT.runner is not None:
            SCRIPT.rows = v2_rows(SCRIPT.runner, input_batch)
        return propose(self, input_batch, *rest, **named)

    return wrapped


def scripted_forward(forward: Any) -> Any:
    """`BlockwiseHeadsModel.forward`, drafting from the script in the batches that ask for it."""
    import torch

    def wrapped(self: Any, hidden_BD: Any, sampled_B: Any) -> Any:
        if SCRIPT.runner is None or SCRIPT.mode not in CORRUPT_EVERY:
            drafted_BK = forward(self, hidden_BD, sampled_B)
            if SCRIPT.runner is not None:
                SCRIPT.highest = max(SCRIPT.highest, int(drafted_BK.max()))
                SCRIPT.blocks += zip(SCRIPT.rows, drafted_BK.tolist(), strict=True)
            return drafted_BK
        predicted = self.projection.top_tokens(hidden_BD).tolist()
        inputs = list(zip(SCRIPT.rows, predicted, sampled_B.tolist(), strict=True))
        for prefix, from_hidden, sampled in inputs:
            SCRIPT.check(prefix, from_hidden, sampled)
        count = self.heads.num_heads
        drafts = [SCRIPT.drafts(prefix, count) for prefix, _, _ in inputs]
        SCRIPT.highest = max(SCRIPT.highest, *map(max, drafts))
        return torch.tensor(drafts, dtype=torch.int64)

    return wrapped


def follow(runner: Any) -> None:
    """Read token rows from `runner` from now on; none while an engine is being built or freed."""
    SCRIPT.runner = runner
