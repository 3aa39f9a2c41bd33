"""Rows lengths, stops, sampling parameters and logprobs, on a target with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration_tests.harness.engine_process import EngineProcess
from integration_tests.harness.jobs import (
    greedy,
    make_job,
    make_prompts,
    record,
    run,
    stand_in,
)
from integration_tests.harness.known import KnownFaultError
from integration_tests.harness.matrix import (
    BLOCK,
    MODES,
    NUM_HEADS,
    Group,
    Request,
    Suite,
    check_group,
)
from integration_tests.harness.oracle import Recording
from integration_tests.harness.stand_ins import STOCK_V1
from integration_tests.harness.tokenizer import EOS, SPECIALS, vocabulary

CONTEXT = 64
FREE = 24  # tokens of the texts that requests are made from
ENGINE = {
    "max_model_len": CONTEXT,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "skip_tokenizer_init": False,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": FREE - BLOCK}
PLACES = range(BLOCK + 2)  # every offset inside a block, and the first two of the next
PIECES = {i: token for token, i in vocabulary().items()}
PROMPTS = make_prompts([6 + n % 5 for n in range(400)], len(PIECES), seed=1)
AT_THE_END = make_prompts([CONTEXT - 1 - n for n in range(BLOCK + 3)], len(PIECES), seed=2)


def piece(token: int) -> str:
    """The text of a token."""
    return "" if token < len(SPECIALS) else PIECES[token].replace("\u0120", " ").replace(
        "\u010a", "\n")  # fmt: skip


class Pool:
    """Recorded texts, each handed out once: two requests never share a prompt."""

    def __init__(self, recordings: list[Recording]) -> None:
        """Begin with all of them."""
        self.left = list(recordings)

    def take(self, wanted: Any = bool) -> Recording:
        """The first text left whose answer is as wanted."""
        found = next(one for one in self.left if wanted(one.answer))
        self.left.remove(found)
        return found

    def plain(self, place: int = BLOCK) -> Recording:
        """A text with no special token near its start, and a token at `place` not seen before."""
        return self.take(
            lambda answer: min(answer[:BLOCK * 2]) >= len(SPECIALS)
            and answer[place] not in answer[:place]
        )  # fmt: skip

    def ending(self, place: int) -> Recording:
        """A text that ends at `place`."""
        return self.take(lambda answer: EOS in answer and answer.index(EOS) == place)


def lengths(pool: Pool) -> list[Request]:
    """`max_tokens` 1 to k + 2, and the context's end 1 to k + 3 tokens away."""
    requests = []
    for count in range(1, BLOCK + 3):
        sampling = GREEDY | {"max_tokens": count, "ignore_eos": True}
        requests.append(Request(f"max_tokens {count}", pool.take().prompt, sampling))
    to_the_end: dict[str, Any] = {"temperature": 0, "max_tokens": None, "ignore_eos": True}
    for prompt in AT_THE_END:
        requests.append(Request(f"{CONTEXT - len(prompt)} to the end", prompt, to_the_end))
    exact = GREEDY | {"max_tokens": BLOCK, "ignore_eos": True}
    prompt = make_prompts([CONTEXT - BLOCK], len(PIECES), seed=3)[0]
    return [*requests, Request("both limits at once", prompt, exact)]


def ends(pool: Pool) -> list[Request]:
    """The end of the text at every offset, heeded and ignored."""
    requests = [Request(f"EOS {p}", pool.ending(p).prompt, GREEDY) for p in PLACES]
    for place in (0, 2, BLOCK):
        ignoring = GREEDY | {"ignore_eos": True}
        requests.append(Request(f"EOS {place} ignored", pool.ending(place).prompt, ignoring))
    return requests


def stops(pool: Pool) -> list[Request]:
    """Stop ids and stop strings at every offset; ids, text and logprobs are cut together."""
    requests = []
    for place in PLACES:
        for name, more in (("", {}), (" with logprobs", {"logprobs": 2})):
            text = pool.plain(place)
            sampling = GREEDY | {"stop_token_ids": [text.answer[place]], **more}
            requests.append(Request(f"stop id {place}{name}", text.prompt, sampling))
        for include in (False, True):
            text = pool.plain(place)
            # It ends inside the next token, where that has two letters.
            string = piece(text.answer[place]) + piece(text.answer[place + 1])[:1]
            sampling = GREEDY | {"stop": [string], "include_stop_str_in_output": include}
            sampling |= {"logprobs": 1}
            name = f"stop string {place}{' included' if include else ''}"
            requests.append(Request(name, text.prompt, sampling))
    return requests


def least_lengths(pool: Pool) -> list[Request]:
    """`min_tokens` 1 to k + 2 where stop ids and the end of the text would come first."""
    requests = []
    for count in range(1, BLOCK + 3):
        text = pool.plain(0)
        sampling = GREEDY | {"min_tokens": count, "stop_token_ids": text.answer[:3]}
        requests.append(Request(f"min_tokens {count}, ids", text.prompt, sampling))
        sampling = GREEDY | {"min_tokens": count, "max_tokens": BLOCK + 3}
        text = pool.take(lambda answer: EOS in answer[:2])
        requests.append(Request(f"min_tokens {count}, EOS", text.prompt, sampling))
    return requests


def penalties(pool: Pool) -> list[Request]:
    """What changes the logits from what was generated before."""
    options: dict[str, dict[str, Any]] = {
        "repetition": {"repetition_penalty": 1.6},
        "repetition below one": {"repetition_penalty": 0.7},
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 1.2},
        "frequency below zero": {"frequency_penalty": -1.5},
        "all three": {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        },
    }
    return [
        Request(f"{name}{copy}", pool.take().prompt, GREEDY | {"ignore_eos": True} | option)
        for name, option in options.items()
        for copy in ("", " again")
    ]


def restrictions(pool: Pool) -> list[Request]:
    """Words and ids that may not come, or alone may."""
    requests = []
    for place in range(3):
        text = pool.plain(place)
        sampling = GREEDY | {"ignore_eos": True, "bad_words": [piece(text.answer[place])]}
        requests.append(Request(f"bad word {place}", text.prompt, sampling))
        text = pool.plain(place + 1)
        two = piece(text.answer[place]) + piece(text.answer[place + 1])
        sampling = GREEDY | {"ignore_eos": True, "bad_words": [two, "never said"]}
        requests.append(Request(f"bad words {place}", text.prompt, sampling))
        allowed = list(range(10 + place, 60, 3))
        sampling = GREEDY | {"ignore_eos": True, "allowed_token_ids": allowed}
        requests.append(Request(f"allowed ids {place}", pool.take().prompt, sampling))
    return requests


def logprobs(pool: Pool) -> list[Request]:
    """Logprobs of the answer, of the prompt, and of both."""
    requests = []
    for count in (0, 1, 5):
        sampling = GREEDY | {"ignore_eos": True, "logprobs": count}
        requests.append(Request(f"logprobs {count}", pool.take().prompt, sampling))
        sampling = GREEDY | {"max_tokens": 3, "prompt_logprobs": count}
        requests.append(Request(f"prompt_logprobs {count}", pool.take().prompt, sampling))
    sampling = GREEDY | {"ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2}
    requests.append(Request("both", pool.take().prompt, sampling))
    sampling = GREEDY | {"ignore_eos": True, "logprobs": 3, "max_tokens": BLOCK + 1}
    return [*requests, Request("cut inside a block", pool.take().prompt, sampling)]


@pytest.fixture(scope="session")
def suite(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Suite]:
    """Filled by the first engine that needs it: key `text`."""
    return {}


@pytest.fixture
def text(
    suite: dict[str, Suite],
    engine: EngineProcess,
    targets: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Suite:
    """The suite, its requests made from what the target says."""
    if "text" not in suite:
        prompts = PROMPTS + AT_THE_END
        roomy = ENGINE | {"max_model_len": 2 * CONTEXT, "max_num_seqs": 128}
        job = make_job(targets["text"], [greedy(prompts, FREE)], **roomy)
        free = record(prompts, run(engine, job)["batches"][0])
        pool = Pool(free[: len(PROMPTS)])
        groups = {
            "ends": Group(ends(pool)),
            "stops": Group(stops(pool)),
            "min_tokens": Group(least_lengths(pool), processors=True),
            "lengths": Group(lengths(pool)),
            "penalties": Group(penalties(pool), processors=True),
            "restrictions": Group(restrictions(pool), processors=True),
            "logprobs": Group(logprobs(pool)),
        }
        folder = tmp_path_factory.mktemp("text")
        made = Suite(targets["text"], folder, dict(ENGINE), groups, free)
        made.record(engine)
        split_off_bonus_ends(groups)
        suite["text"] = made
    return suite["text"]


def split_off_bonus_ends(groups: dict[str, Group]) -> None:
    """Move apart the `min_tokens` requests that end in a token sampled behind a whole block.

    With right drafts blocks begin at places 1, 6, 11, ...; such a block begins before `min_tokens`
    are there, and its last token, for which there was no draft, ends the text.
    """
    source = groups["min_tokens"]
    apart = Group([], processors=True)
    for request, output in list(zip(source.requests, source.expected, strict=True)):
        completion = output["completions"][0]
        last = len(completion["token_ids"]) - 1
        begins = last - NUM_HEADS
        whole = completion["finish_reason"] == "stop" and last % BLOCK == 0
        if whole and begins < request.sampling["min_tokens"] <= last:
            apart.requests.append(request)
            apart.expected.append(output)
            source.requests.remove(request)
            source.expected.remove(output)
    assert apart.requests, "no request ends where this can be seen"
    groups[BONUS_ENDS] = apart


BONUS_ENDS = "min_tokens at a block's end"
BONUS_FAULT = (
    "vLLM's model runner V1: stop ids stay barred for the token behind a whole block, though "
    "`min_tokens` are there by then; any drafter shows it (test_the_engine_alone)"
)
STOPS_FAULT = (
    "vLLM 0.29's front end: what a block brings behind a stop string stays in the ids; any "
    "drafter shows it (test_the_engine_alone)"
)
ROWS = {
    "lengths": "lengths",
    "ends": "lengths",
    "stops": "stops",
    "min_tokens": "stops",
    BONUS_ENDS: "stops",
    "penalties": "sampling parameters",
    "restrictions": "sampling parameters",
    "logprobs": "logprobs",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=pytest.mark.row(r)) for g, r in ROWS.items()]
)
def test_as_without_speculation(
    text: Suite, engine: EngineProcess, request: pytest.FixtureRequest, group: str, mode: str
) -> None:
    """Ids, text, reasons and logprobs of every request."""
    fault = ""
    if (group, mode, engine.combo.runner) == (BONUS_ENDS, "oracle", "V1"):
        fault = BONUS_FAULT
    if (group, engine.combo.release) == ("stops", "0.29") and mode in ("oracle", "corrupted"):
        fault = STOPS_FAULT
    if fault:
        request.applymarker(pytest.mark.xfail(reason=fault, raises=KnownFaultError))
    reply = text.play(engine, group, mode)
    if fault and only_ends_differ(text.groups[group], reply):
        raise KnownFaultError(fault)
    check_group(text.groups[group], reply)


def only_ends_differ(group: Group, batch: dict[str, Any]) -> bool:
    """Whether some answers differ, and none of them before its last token."""
    differ = False
    for outputs in batch["rounds"]:
        for expected, found in zip(group.expected, outputs, strict=True):
            [due], [got] = expected["completions"], found["completions"]
            before_the_last = len(due["token_ids"]) - 1
            if due["token_ids"][:before_the_last] != got["token_ids"][:before_the_last]:
                return False
            differ |= due["token_ids"] != got["token_ids"]
    # Drafts of recorded answers: an answer that ends in another way has none.
    return differ and all(fault.startswith("no recording begins") for fault in batch["faults"])


@pytest.mark.row("stops")
@pytest.mark.parametrize("name", [BONUS_ENDS, "stops"])
def test_the_engine_alone(text: Suite, engine: EngineProcess, name: str) -> None:
    """What is expected to fail fails in the same way with drafts that no plugin has made (V1)."""
    if engine.combo.runner != "V1":
        pytest.skip("the fault is model runner V1's, or shown on it")
    if name == "stops" and engine.combo.release != "0.29":
        pytest.skip("the fault is vLLM 0.29's")
    group = text.groups[name]
    job = make_job(text.target, [group.batch("oracle")], **text.engine)
    job["llm"]["speculative_config"] = {**STOCK_V1, "num_speculative_tokens": NUM_HEADS}
    reply = run(engine, job | {"drafts": stand_in("stock", text.recordings())})
    outputs = reply["batches"][0]["outputs"]
    assert outputs != group.expected
    assert outputs == text.play(engine, name, "oracle")["outputs"]


@pytest.mark.row("sampling parameters")
@pytest.mark.parametrize("option", [{"min_p": 0.2}, {"logit_bias": {5: 2.0}}], ids=str)
def test_what_the_engine_refuses(text: Suite, engine: EngineProcess, option: Any) -> None:
    """`min_p` and `logit_bias`: the engine's own refusal, and the next request is served."""
    asked = text.groups["penalties"].requests[0]
    refused = Request("refused", asked.prompt, GREEDY | {"temperature": 1.0} | option)
    batch = Group([refused, asked]).batch()
    config = {"method": "bpd", "model": str(text.heads)}
    job = make_job(text.target, [batch], speculative_config=config, **text.engine)
    outputs = run(engine, job)["batches"][0]["outputs"]
    assert "not yet supported with speculative decoding" in outputs[0]["refused"]
    assert outputs[1] == text.groups["penalties"].expected[0]


@pytest.mark.row("sampling")
def test_beams_are_the_targets(text: Suite, engine: EngineProcess) -> None:
    """Beam search asks for one token at a time, with logprobs: the same beams."""
    prompts = [request.prompt for request in text.groups["logprobs"].requests[:3]]
    beams = {"prompts": prompts, "beam": {"beam_width": 3, "max_tokens": 4, "ignore_eos": True}}
    config = {"method": "bpd", "model": str(text.heads)}
    plain, searched = (
        run(engine, make_job(text.target, [beams], **text.engine, **more))["batches"][0]["outputs"]
        for more in ({}, {"speculative_config": config})
    )
    assert [[ids for ids, _ in output["beams"]] for output in searched] == [
        [ids for ids, _ in output["beams"]] for output in plain
    ]
