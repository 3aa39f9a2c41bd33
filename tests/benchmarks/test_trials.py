"""Trials train, are judged, and are not run twice; what they compare is what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ablation, learning_curve, trials
from benchmarks.trials import JUDGED, Ground, Trial, answer_tokens, run_trials
from heads_training.hidden_states import write_states
from heads_training.recipe import make_recipe, read_recipe
from heads_training.target import read_rows
from heads_training.train import TrainConfig
from tests.heads_training.made_data import TINY
from vllm_bpd.errors import HeadsError

SHORT = replace(TINY, steps=20, validate_every=20, lattice_places=3)


@pytest.fixture
def ground(tiny_target: Path, tiny_answers: Path, tmp_path: Path) -> Ground:
    shards = write_states(str(tiny_target), tiny_answers, tmp_path / "states")
    return Ground(read_rows(str(tiny_target)), shards, shards[1:], tmp_path)


@pytest.fixture
def shipped() -> TrainConfig:
    return make_recipe(read_recipe("smollm2-135m-cpu"), {"target": "any"}).train


def test_a_trial_is_judged_and_kept(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial("one", SHORT, ground.shards)
    [(_, figures)] = run_trials(ground, [trial])
    assert set(figures["drafters"]) == set(JUDGED)
    assert figures["answer_tokens"] == answer_tokens(ground.judged[0])
    assert figures["trained_tokens"] < sum(map(answer_tokens, ground.shards))  # some are held out
    assert (ground.work / "one" / "heads" / "config.json").is_file()
    for drafter in JUDGED:
        row = figures["drafters"][drafter]["all"]["2"]
        assert 1 <= row["tokens_per_step"] <= 2

    def fail(*_: object) -> None:
        raise AssertionError("trained twice")

    monkeypatch.setattr(trials, "train", fail)
    [(_, again)] = run_trials(ground, [trial])
    assert again == figures
    with pytest.raises(AssertionError, match="trained twice"):
        list(run_trials(ground, [replace(trial, config=replace(SHORT, steps=21))]))


def test_heads_that_learnt_the_answers_are_better(ground: Ground) -> None:
    """The figures are the heads' own: trained for longer on what they are judged on, they rise."""
    everything = replace(SHORT, validation=0.1)
    found = run_trials(
        ground,
        [
            Trial("short", replace(everything, steps=1), ground.shards),
            Trial("long", replace(everything, steps=400, validate_every=400), ground.shards),
        ],
    )
    short, long = (f["drafters"]["heads"]["all"]["2"]["tokens_per_step"] for _, f in found)
    assert long > short + 0.2


def test_sizes_are_whole_files_and_equal_passes(ground: Ground) -> None:
    held = [answer_tokens(shard) for shard in ground.shards]
    config = replace(SHORT, steps=1, batch_size=10)
    few, all_of_them = learning_curve.sizes(ground, config, [sum(held), 1], epochs=2.0)
    assert (few.shards, all_of_them.shards) == (ground.shards[:1], ground.shards)
    assert few.config.steps == -(-2 * held[0] // 10)
    assert all_of_them.config.steps == -(-2 * sum(held) // 10)
    [least] = learning_curve.sizes(ground, replace(config, steps=10_000), [1], epochs=2.0)
    assert least.config.steps == 10_000
    assert len(learning_curve.sizes(ground, config, None, epochs=2.0)) == 4
    with pytest.raises(HeadsError, match="tokens: found 1000000; the answers hold"):
        learning_curve.sizes(ground, config, [1_000_000], epochs=2.0)


def test_trials_change_what_they_say(shipped: TrainConfig) -> None:
    found = ablation.make_configs(shipped)
    assert found["all"] == shipped
    assert found["plain"] == replace(shipped, **ablation.PLAIN)
    for name, fields in ablation.STEPS.items():
        for field, value in ablation.PLAIN.items():
            expected = getattr(shipped, field) if field in fields else value
            assert getattr(found[name], field) == expected
            assert value != getattr(shipped, field), "a step that changes nothing"
    assert len({str(config) for config in found.values()}) == len(found)


def test_two_heads_of_the_same_size_are(shipped: TrainConfig) -> None:
    def weights(config: TrainConfig) -> int:
        hidden = config.num_draft_heads * config.head_hidden_size
        return hidden * (2 + config.num_draft_heads)  # times the target's hidden size

    found = ablation.make_configs(shipped)
    ratio = weights(found["all, two heads of the same size"]) / weights(shipped)
    assert 0.99 < ratio <= 1


def test_names_that_are_none_are_refused() -> None:
    made = ablation.make_configs(SHORT)
    assert list(ablation.chosen(made, ["all", "plain"])) == ["plain", "all"]
    assert ablation.chosen(made, None) == made
    with pytest.raises(HeadsError, match="only: found 'none'; expected some of 'plain', "):
        ablation.chosen(made, ["none"])


@pytest.mark.parametrize("k", [1, 5, 99])
def test_a_block_that_cannot_be_drafted_is_refused(k: int) -> None:
    with pytest.raises(HeadsError, match=f"k: found {k}; expected 2 to 4, as 3 tokens are drafted"):
        trials.require_k(k, 3)
    trials.require_k(4, 3)


def test_figures_that_cannot_be_read_count_as_none(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial("one", SHORT, ground.shards)
    [(_, found)] = run_trials(ground, [trial])
    path = ground.work / "one" / trials.FIGURES_FILE
    for text in ('{"made', "{}", "[]"):
        path.write_text(text)
        monkeypatch.setattr(trials, "_run", lambda *_, text=text: {"again": text})
        [(_, again)] = run_trials(ground, [trial])
        assert again == {"made with": found["made with"], "again": text}


def test_tables_have_a_row_each(ground: Ground) -> None:
    [(_, figures)] = run_trials(ground, [Trial("one", SHORT, ground.shards)])
    table = learning_curve.as_markdown([figures, figures], "2")
    assert table.count(f"| {figures['trained_tokens']:,} |") == 2 * len(JUDGED)
    trials.draw(ground.work / "curve.svg", "tokens", [1, 2], [figures, figures], "2")
    assert (ground.work / "curve.svg").stat().st_size > 1000
    assert ablation.as_markdown({"one": figures}).count("| one |") == len(JUDGED)
