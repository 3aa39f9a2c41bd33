"""Inside an engine process: what a lattice drafts, held against each request's true text.

The lattice reads a request's words from the model runner's table. The scheduler keeps each text,
too, in lists of its own: drafting once more from those, with the candidates that the heads gave,
must give the same. So a row that is stale, cut short or another request's shows.

Shape suffixes: B requests, D hidden size, V vocabulary, K heads, M candidates of a head, P places
of the block, F weights, W window.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Given:
    """What the heads made of one batch, and the tokens that its hidden states stand for.

    Where the heads rest, and the text drafts alone, they make nothing (K = 0) and read nothing.
    """

    ids_BKM: Any
    logp_BKM: Any
    predicted: list[int] | None


def nothing_given(requests: int) -> Given:
    """What heads that rest make of so many requests."""
    import torch

    empty_BKM = torch.empty(requests, 0, 0)
    return Given(empty_BKM.long(), empty_BKM, None)


@dataclass(frozen=True)
class Block:
    """What is drafted for one request."""

    ids: list[int]
    from_context: list[bool]


@dataclass(frozen=True)
class Draft:
    """One block that was drafted for one request."""

    request: Any  # the scheduler's; its text grows on
    length: int  # tokens of it that were known
    resumed: bool  # it was preempted before
    given: Given
    row: int  # of `given`
    sampled: int  # the last token known, as the drafter was told
    ids: list[int]
    weights_PF: Any
    window: int
    least: float | None  # V1's min_confidence

    def redrafted(self, window: int) -> Block:
        """The block drafted from the last `window` tokens of the scheduler's text."""
        text = list(self.request.all_token_ids)[: self.length]
        one = slice(self.row, self.row + 1)
        if self.least is None:
            return on_the_device(
                text, window, self.given.ids_BKM[one], self.given.logp_BKM[one], self.weights_PF
            )
        return on_the_host(
            text, window, self.given.ids_BKM[one], self.given.logp_BKM[one], self.weights_PF,
            self.least,
        )  # fmt: skip


def on_the_host(
    text: list[int], window: int, ids_BKM: Any, logp_BKM: Any, weights_PF: Any, least: float
) -> Block:
    """As model runner V1 drafts."""
    import numpy as np

    from vllm_bpd.lattice_host import draft_blocks

    ids_BP, counts_B, from_context_BP = draft_blocks(
        np.array([text], np.int32), np.zeros(1, np.int64), np.array([len(text)]),
        ids_BKM.numpy(), logp_BKM.numpy(), weights_PF.numpy(), window, least,
    )  # fmt: skip
    count = counts_B[0]
    return Block(ids_BP[0, :count].tolist(), from_context_BP[0, :count].tolist())


def on_the_device(
    text: list[int], window: int, ids_BKM: Any, logp_BKM: Any, weights_PF: Any
) -> Block:
    """As model runner V2 drafts."""
    import torch

    from vllm_bpd.lattice import draft_block

    width = max(window, 2)
    words = text[-window:] if window else []
    window_BW = torch.tensor([[-1] * (width - len(words)) + words], dtype=torch.int32)
    drafted = draft_block(window_BW, ids_BKM, logp_BKM, weights_PF)
    return Block(drafted.ids_BP[0].tolist(), drafted.from_context_BP[0].tolist())


@dataclass
class Watch:
    """Every block drafted for the requests of one batch, and every step of the engine."""

    scheduler: Any
    asynchronous: bool  # the scheduler's texts lag behind
    drafts: list[Draft] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)  # in this step: one, or none
    lengths: dict[int, int] = field(default_factory=dict)  # by the identity of the request
    steps: list[list[int]] = field(default_factory=list)  # of each: requests, drafts to verify

    def note(self, request_id: str, tokens: int, **draft: Any) -> None:
        """A block for a request that has just got `tokens` tokens."""
        request = self.scheduler.requests.get(request_id)
        if request is None:  # asynchronously, a step is under way when its request ends
            return
        known = request.num_tokens  # whatever happened in steps that drafted nothing
        if self.asynchronous:
            known = self.lengths.get(id(request), request.num_prompt_tokens)
        length = known + tokens
        self.lengths[id(request)] = length
        resumed = request.num_preemptions > 0
        self.drafts.append(Draft(request, length, resumed, self.given[-1], **draft))

    def report(self, processors: bool) -> dict[str, Any]:
        """How many blocks there were, how many the text made different, and what was wrong.

        `by_heads` counts those that the heads had a part in, `by_text_alone` those drafted while
        the heads rested. With `processors` the hidden state alone does not tell which token was
        sampled.
        """
        found = dict.fromkeys(("drafts", "moved", "moved_resumed", "by_heads", "by_text_alone"), 0)
        found["highest"] = -1
        faults = []
        for draft in self.drafts:
            text = draft.request.all_token_ids
            if draft.length > len(text):  # it ended inside its last block: nothing is verified
                continue
            found["drafts"] += 1
            found["highest"] = max([found["highest"], *draft.ids])
            moved = draft.ids != draft.redrafted(0).ids
            found["moved"] += moved
            found["moved_resumed"] += moved and draft.resumed
            where = f"request {draft.request.request_id} at token {draft.length}"
            expected = draft.redrafted(draft.window)
            if draft.ids != expected.ids:
                faults.append(f"{where}: drafted {draft.ids}, its text gives {expected.ids}")
            found["by_heads"] += not all(expected.from_context)
            last = text[draft.length - 1]
            predicted = last
            if draft.given.predicted is not None:
                predicted = draft.given.predicted[draft.row]
            elif draft.ids:
                found["by_text_alone"] += 1
            if draft.sampled != last or (predicted != last and not processors):
                faults.append(
                    f"{where}: the last one is {last}, the heads were told {draft.sampled}, and "
                    f"their hidden state gives {predicted}"
                )
        return {**found, "steps": self.steps, "faults": faults[:10]}


@contextmanager
def watching(llm: Any) -> Iterator[Watch]:
    """Note what is drafted until the end, by whichever model runner the engine has."""
    from vllm_bpd.model import BlockwiseHeadsModel
    from vllm_bpd.proposer import BpdProposer

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = llm.llm_engine.vllm_config
    watch = Watch(scheduler, bool(config.scheduler_config.async_scheduling))
    wrappers: list[tuple[Any, str, Any]] = [
        (type(scheduler), "schedule", noting_steps),
        (BlockwiseHeadsModel, "candidates", noting_candidates),
        (BpdProposer, "propose", noting_v1),
    ]
    if config.use_v2_model_runner:
        from vllm_bpd.speculator import BpdSpeculator

        wrappers.append((BpdSpeculator, "propose", noting_v2))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wrappers]
    for owner, name, wrap in wrappers:
        setattr(owner, name, wrap(getattr(owner, name), watch))
    try:
        yield watch
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def noting_steps(schedule: Any, watch: Watch) -> Any:
    """`Scheduler.schedule`, noting how many requests and drafts each step has."""

    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        step = schedule(self, *args, **named)
        drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        watch.steps.append([len(step.num_scheduled_tokens), drafts])
        return step

    return wrapped


def noting_candidates(candidates: Any, watch: Watch) -> Any:
    """`BlockwiseHeadsModel.candidates`, noting what it gives."""

    def wrapped(self: Any, hidden_BD: Any, sampled_B: Any) -> Any:
        ids_BKM, logp_BKM = candidates(self, hidden_BD, sampled_B)
        head = self.projection.lm_head  # of all ids, where the heads score few
        logits_BV = head.quant_method.apply(head, hidden_BD, bias=getattr(head, "bias", None))
        predicted = logits_BV[:, : head.org_vocab_size].argmax(-1).tolist()
        watch.given.append(Given(ids_BKM.clone(), logp_BKM.clone(), predicted))
        return ids_BKM, logp_BKM

    return wrapped


def noting_v1(propose: Any, watch: Watch) -> Any:
    """`BpdProposer.propose`, noting its blocks."""

    def wrapped(
        self: Any, sampled: Any, states: Any, before: Any, num_drafts: int, texts: Any, *more: Any
    ) -> Any:
        watch.given.clear()
        drafts = propose(self, sampled, states, before, num_drafts, texts, *more)
        places = [place for place, tokens in enumerate(sampled) if tokens]
        lowest, by_text_alone, _ = self._how_sure(len(texts.request_ids))
        if by_text_alone and places and num_drafts > 0 and lowest < 1:
            assert not watch.given, "the heads were to rest"
            watch.given.append(nothing_given(len(places)))
        if not watch.given or self.model.lattice_weights_PF is None:
            return drafts
        speculative = self.vllm_config.speculative_config
        for row, place in enumerate(places):
            watch.note(
                texts.request_ids[place],
                len(sampled[place]),
                row=row,
                sampled=sampled[place][-1],
                ids=drafts[place],
                weights_PF=self.model.lattice_weights_PF[:num_drafts],
                window=speculative.context_window if speculative.context_lookup else 0,
                least=lowest,
            )
        return drafts

    return wrapped


def noting_v2(propose: Any, watch: Watch) -> Any:
    """`BpdSpeculator.propose`, noting its blocks; rows that sampled nothing have none."""
    signature = inspect.signature(propose)

    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        watch.given.clear()
        drafts = propose(self, *args, **named)
        asked = signature.bind(self, *args, **named).arguments
        if not watch.given or asked.get("dummy_run"):
            return drafts
        batch, speculative = asked["input_batch"], self.speculative_config
        last = asked["last_sampled"].view(-1)[batch.idx_mapping[: batch.num_reqs].long()].tolist()
        counts = asked["num_sampled"][: batch.num_reqs].tolist()
        for row, tokens in enumerate(counts):
            if tokens:
                watch.note(
                    batch.req_ids[row],
                    tokens,
                    row=row,
                    sampled=last[row],
                    ids=drafts[row].tolist(),
                    weights_PF=self.lattice_weights_PF,
                    window=len(self.window_W) if speculative.context_lookup else 0,
                    least=None,
                )
        return drafts

    return wrapped
