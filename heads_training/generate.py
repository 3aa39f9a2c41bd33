"""Answers for training: by the target, by a teacher, or as they were given; written as they come.

A chunk of prompts is one file, whole or not there, so the same call goes on after an interruption,
and several processes can share the chunks. What the files hold: `heads_training.records`; what
lies beside them: `heads_training.answers_folder`.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from heads_training.answers_folder import (
    check_settings,
    count_chunks,
    describe_model,
    summarise,
    summary_line,
    write_counts,
)
from heads_training.chat import check_same_vocabulary, load_tokenizer, prompt_ids, stop_token_ids
from heads_training.conversation import to_records
from heads_training.degenerate import count_degenerate, degeneracy
from heads_training.engines import Engine, EngineName, EngineOptions, Request, open_engine
from heads_training.parallel import run_engines
from heads_training.passages import Task, pick_tasks
from heads_training.prompts import (
    Conversation,
    Prompt,
    digest,
    read_conversations,
    read_dataset,
    to_prompt,
)
from heads_training.records import Record, chunk_paths, write_records
from heads_training.self_written import (
    pick_openers,
    request_seed,
    write_second_turns,
    write_tasks,
    write_user_turns,
)
from heads_training.target import resolve_target
from vllm_bpd.errors import HeadsError

logger = logging.getLogger(__name__)

# How the work is shared and run, not what is made: these may differ when a run goes on.
_NOT_COMPARED = ("output", "worker", "workers", "engines", "engine", "tensor_parallel")


@dataclass(frozen=True)
class GenerateConfig:
    """How the training answers are made."""

    target: Annotated[str, "model folder or hub id"]
    output: Annotated[Path, "folder that receives answers-<chunk>.jsonl"]
    prompts: Annotated[tuple[Path, ...], "JSONL prompt files, used beside self-written ones"] = ()
    self_written: Annotated[int, "prompts the target writes itself"] = 2000
    passages: Annotated[float, "share of these about a passage it writes first, 0..1"] = 0.25
    second_turns: Annotated[float, "share of these that go on for a second turn, 0..1"] = 0.2
    dataset: Annotated[str | None, "data set of prompts: hub id, folder, JSONL or Parquet"] = None
    dataset_config: Annotated[str | None, "the data set's configuration, if it has several"] = None
    dataset_split: Annotated[str, "the data set's split"] = "train"
    dataset_rows: Annotated[int, "rows of it at most, drawn by the seed; 0: all"] = 0
    answers_from: Annotated[
        Literal["target", "given"], "given: the conversations' own assistant turns"
    ] = "target"
    teacher: Annotated[str | None, "model of the same vocabulary that answers in its place"] = None
    engine: Annotated[EngineName, "auto: vllm where it is installed"] = "auto"
    temperature: Annotated[float, "of the answers; 0: greedy"] = 0.0
    top_p: Annotated[float, "of sampled answers, 0..1"] = 1.0
    beams: Annotated[int, "width of the beam search for answers; 1: none"] = 1
    answer_tokens: Annotated[int, "longest answer, tokens"] = 256
    drop_loops: Annotated[bool, "leave out answers that end in a loop"] = False
    drop_cut: Annotated[bool, "leave out answers cut off at their longest, loops too"] = False
    chunk: Annotated[int, "prompts a chunk; one file each, written whole or not at all"] = 256
    seed: Annotated[int, "draws openers, sampling and order"] = 0
    worker: Annotated[int, "this process's index: it makes chunks worker, worker + workers, .."] = 0
    workers: Annotated[int, "processes that share the work, each with its own engine"] = 1
    engines: Annotated[int, "processes that this call starts, to share its own work"] = 1
    tensor_parallel: Annotated[int, "GPUs an engine (vllm)"] = 1
    max_model_len: Annotated[int, "tokens, prompt and answer"] = 2048
    max_num_seqs: Annotated[int, "requests decoded at once"] = 128
    dtype: Annotated[str, "the engine's dtype, the one that will be served"] = "auto"

    def __post_init__(self) -> None:
        """Refuse impossible values. Raises HeadsError naming field, found and expected."""
        at_least_one = ("answer_tokens", "chunk", "workers", "engines", "max_num_seqs", "beams")
        for name in (*at_least_one, "tensor_parallel"):
            if getattr(self, name) < 1:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected at least 1")
        for name in ("dataset_rows", "temperature"):
            if getattr(self, name) < 0:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected at least 0")
        if not 0 <= self.worker < self.workers:
            raise HeadsError(f"worker: found {self.worker}; expected 0..{self.workers - 1}")
        for name in ("passages", "second_turns"):
            if not 0 <= getattr(self, name) <= 1:
                raise HeadsError(f"{name}: found {getattr(self, name)}; expected 0 to 1")
        given = bool(self.prompts or self.dataset)
        if self.self_written < 0 or not (self.self_written or given):
            raise HeadsError(
                f"self_written: found {self.self_written}; expected at least 1, or prompt files, "
                "or a data set"
            )
        if self.max_model_len <= self.answer_tokens:
            raise HeadsError(
                f"max_model_len: found {self.max_model_len}; expected more than answer_tokens "
                f"({self.answer_tokens}), to leave room for a prompt"
            )
        self._check_answers(given)

    def _check_answers(self, given: bool) -> None:
        """Refuse ways to answer that exclude each other."""
        if not 0 < self.top_p <= 1:
            raise HeadsError(f"top_p: found {self.top_p}; expected more than 0, at most 1")
        if self.beams > 1 and self.temperature:
            raise HeadsError(
                f"beams: found {self.beams} at temperature {self.temperature}; expected "
                "temperature 0, or 1 beam"
            )
        if self.answers_from != "given":
            return
        if not given:
            raise HeadsError("answers_from: found given; expected prompt files or a data set too")
        if self.teacher:
            raise HeadsError(
                f"teacher: found {self.teacher} beside given answers; expected one of them"
            )


@dataclass(frozen=True)
class _Planned:
    """What one place of a chunk is made from."""

    item: Prompt | Conversation | Task | tuple[str, int]  # the last: opener, longest completion
    second_turn: bool = False


def _read(config: GenerateConfig) -> tuple[list[Conversation], dict[str, Any]]:
    """Every given conversation, and what the settings say of where they came from."""
    found, files = [], []
    for path in config.prompts:
        found.extend(read_conversations(path))
        files.append([path.name, hashlib.sha256(path.read_bytes()).hexdigest()])
    settings: dict[str, Any] = {"prompts": files}
    if config.dataset:
        rows = read_dataset(
            config.dataset,
            config.dataset_config,
            config.dataset_split,
            config.dataset_rows,
            config.seed,
        )
        found.extend(rows)
        settings["dataset"] = [Path(config.dataset).name, digest(rows)]
    return found, settings


def _plan(config: GenerateConfig, given: Sequence[Conversation]) -> list[list[_Planned]]:
    """The chunks: the same for every worker and every restart."""
    if config.answers_from == "given":
        planned = [_Planned(conversation) for conversation in given]
    else:
        tasks = round(config.passages * config.self_written)
        own: list[Task | tuple[str, int]] = [*pick_tasks(tasks, config.seed)]
        own.extend(pick_openers(config.self_written - tasks, config.seed))
        rng = random.Random(config.seed)
        planned = [_Planned(to_prompt(conversation)) for conversation in given]
        planned += [_Planned(item, rng.random() < config.second_turns) for item in own]
    random.Random(config.seed).shuffle(planned)
    return [planned[i : i + config.chunk] for i in range(0, len(planned), config.chunk)]


def _settings(config: GenerateConfig, given: dict[str, Any]) -> dict[str, Any]:
    """What answers must have been made with to be this run's; no machine's paths."""
    settings = {name: v for name, v in asdict(config).items() if name not in _NOT_COMPARED}
    settings |= given
    for name in ("target", "teacher"):
        model = getattr(config, name)
        if model:
            settings[name] = Path(model).name
            settings[f"{name}_fingerprint"] = describe_model(resolve_target(model, name))
    return settings


def generate(config: GenerateConfig) -> int:
    """Write every chunk of this worker that is not on disk yet; answer tokens written.

    Raises HeadsError for prompts, models or a tokenizer that cannot be used.
    """
    from tqdm import tqdm

    given, settings = _read(config)
    chunks = _plan(config, given)
    check_settings(config.output, _settings(config, settings), config.worker)
    paths = [config.output / f"answers-{number:05d}.jsonl" for number in range(len(chunks))]
    todo = [
        number
        for number, path in enumerate(paths)
        if number % config.workers == config.worker and not path.exists()
    ]
    if not todo:
        logger.info("%s: every answer is there already", config.output)
        return 0
    if config.engines > 1:
        mine = {paths[number] for number in todo}
        run_engines(config, lambda: len(mine & set(chunk_paths(config.output))), len(todo))
    else:
        maker = _ChunkMaker(config)
        try:
            for number in tqdm(todo, unit="chunk"):
                maker.write(number, chunks[number], paths[number])
        finally:
            # Otherwise an engine's processes hold their memory and cores until this one ends,
            # through all of the training that `bpd-train all` goes on with.
            maker.close()
    logger.info("%s: %s", config.output, summary_line(summarise(config.output, config.worker)))
    return count_chunks([paths[number] for number in todo])["answer_tokens"]


class _ChunkMaker:
    """Makes chunks with the target's tokenizer and, unless answers are given, an engine."""

    def __init__(self, config: GenerateConfig) -> None:
        """Load them. Raises HeadsError for a model, or a teacher, that cannot be used."""
        self._config = config
        folder = resolve_target(config.target)
        self._tokenizer = load_tokenizer(folder)
        self._stop_ids = stop_token_ids(folder, self._tokenizer)
        self._counts: Counter[str] = Counter()  # of the chunk being made
        self._engine: Engine | None = None
        if config.answers_from == "given":
            return
        if config.teacher:
            folder = resolve_target(config.teacher, "teacher")
            check_same_vocabulary(
                self._tokenizer, load_tokenizer(folder, "teacher"), config.teacher
            )
        options = EngineOptions(
            folder,
            config.dtype,
            config.max_model_len,
            config.max_num_seqs,
            self._stop_ids,
            config.beams,
            config.tensor_parallel,
            config.seed,
        )
        self._engine = open_engine(config.engine, options)

    def close(self) -> None:
        """Give back the engine's memory."""
        if self._engine is not None:
            self._engine.close()

    def write(self, number: int, planned: list[_Planned], path: Path) -> None:
        """Make chunk `number` and write it, its counts first."""
        self._counts = Counter()
        if self._engine is None:
            records = self._given([p.item for p in planned if isinstance(p.item, Conversation)])
        else:
            records = self._answered(self._engine, number, planned)
        self._counts.update(count_degenerate(records))
        kept = [record for record in records if not self._drops(degeneracy(record))]
        self._counts["dropped"] = len(records) - len(kept)
        self._counts["answer_tokens"] = sum(len(record.answer_token_ids) for record in kept)
        write_counts(path, self._counts)
        write_records(path, kept)

    def _drops(self, kind: str | None) -> bool:
        """Whether answers of this degeneracy are left out; empty ones always are."""
        config = self._config
        return (
            kind == "empty"
            or (kind == "loop" and (config.drop_loops or config.drop_cut))
            or (kind == "cut" and config.drop_cut)
        )

    def _given(self, conversations: list[Conversation]) -> list[Record]:
        """The assistant turns of these conversations, unless they are too long to run."""
        records = []
        for conversation in conversations:
            for record in to_records(conversation, self._tokenizer, self._stop_ids):
                length = len(record.prompt_token_ids) + len(record.answer_token_ids)
                if length <= self._config.max_model_len:
                    records.append(record)
                else:
                    self._counts["too_long"] += 1
        return records

    def _answered(self, engine: Engine, number: int, planned: list[_Planned]) -> list[Record]:
        """Answers to the chunk's prompts, then to the second turns behind some of them."""
        seed = request_seed(self._config.seed, number)
        prompts: list[tuple[Prompt | None, bool]] = [
            (p.item, False) for p in planned if isinstance(p.item, Prompt)
        ]
        openers = [(p.item, p.second_turn) for p in planned if isinstance(p.item, tuple)]
        written = write_user_turns(engine, self._tokenizer, [item for item, _ in openers], seed)
        prompts += zip(written, (second for _, second in openers), strict=True)
        tasks = [(p.item, p.second_turn) for p in planned if isinstance(p.item, Task)]
        written = write_tasks(engine, self._tokenizer, [item for item, _ in tasks], seed)
        prompts += zip(written, (second for _, second in tasks), strict=True)
        usable = [(prompt, second) for prompt, second in prompts if prompt is not None]
        self._counts["unusable"] += len(prompts) - len(usable)
        answers = self._answer(engine, [prompt for prompt, _ in usable], (seed, 1))
        records = [record for record in answers if record is not None]
        # Who has been cut off has not been answered yet, and asks nothing further.
        again = [
            (prompt, record.answer_token_ids)
            for (prompt, second), record in zip(usable, answers, strict=True)
            if second and record is not None and record.finish_reason == "stop"
        ]
        followed = write_second_turns(engine, self._tokenizer, again, seed)
        second_prompts = [prompt for prompt in followed if prompt is not None]
        self._counts["unusable"] += len(followed) - len(second_prompts)
        answers = self._answer(engine, second_prompts, (seed, 2))
        return records + [record for record in answers if record is not None]

    def _answer(
        self, engine: Engine, prompts: list[Prompt], seed: tuple[int, int]
    ) -> list[Record | None]:
        """The answer to each prompt, in order; None for one that leaves an answer no room."""
        config = self._config
        longest = config.max_model_len - config.answer_tokens
        ids = [prompt_ids(self._tokenizer, prompt.messages) for prompt in prompts]
        fitting = [i for i in range(len(prompts)) if len(ids[i]) <= longest]
        self._counts["too_long"] += len(prompts) - len(fitting)
        records: list[Record | None] = [None] * len(prompts)
        if not fitting:  # which vLLM's beam search cannot do
            return records
        if config.beams > 1:
            texts = engine.beam_search([ids[i] for i in fitting], config.answer_tokens)
        else:
            requests = [
                Request(
                    ids[i],
                    config.answer_tokens,
                    config.temperature,
                    config.top_p,
                    request_seed(*seed, i),
                )
                for i in fitting
            ]
            texts = engine.complete(requests)
        for i, text in zip(fitting, texts, strict=True):
            records[i] = Record(ids[i], text.token_ids, text.finish_reason, prompts[i].source)
        return records
