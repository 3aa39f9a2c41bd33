"""The made-up languages: what is drawn is right, and what is right can be told from what is not."""

from __future__ import annotations

import random

import pytest

from benchmarks.paper_task import EOS, Clause, Noun, Phrase, Task


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(seed=3)


def test_every_translation_is_valid_and_few_changes_are(task: Task) -> None:
    rng = random.Random(0)
    changed_but_valid = 0
    for _ in range(300):
        sentence = task.draw(rng)
        said = task.translate(sentence, rng)
        assert task.is_valid(sentence, said)
        assert not task.is_valid(sentence, said[:-1])  # EOS belongs to it
        assert max(said + task.source(sentence)) < task.vocab_size
        place, other = rng.randrange(len(said) - 1), rng.randrange(task.vocab_size)
        if other != said[place]:
            changed_but_valid += task.is_valid(sentence, [*said[:place], other, *said[place + 1 :]])
    assert changed_but_valid <= 3


def test_a_sentence_has_many_translations(task: Task) -> None:
    rng = random.Random(1)
    sentence = task.draw(rng)
    while len(sentence) < 2:
        sentence = task.draw(rng)
    assert len({tuple(task.translate(sentence, rng)) for _ in range(100)}) > 5


def test_agreement_and_order() -> None:
    """By hand: a lexicon of one word of each kind, whose noun has two translations."""
    task = Task(seed=3)
    piece = iter(range(100, 120))
    first, second = Noun((next(piece),), 0), Noun((next(piece),), 2)
    adjective, verb, adverb = (next(piece),), (next(piece),), (next(piece),)
    task.noun_words = [[first, second]] * task.nouns
    task.adjective_words = [[adjective]] * task.adjectives
    task.verb_words = [[verb]] * task.verbs
    task.adverb_words = [[adverb]] * task.adverbs
    phrase = Phrase(noun=0, adjective=0, plural=False, definite=False)
    sentence = (Clause(phrase, 0, phrase, 0),)
    rng = random.Random(0)
    said = {tuple(task.translate(sentence, rng)) for _ in range(200)}
    assert len(said) == 2 * 2 * 2  # two nouns, twice, and two places for the adverb
    for words in said:
        assert words[-1] == EOS
        assert words[-3] == verb[0]  # the verb and its ending come last
        assert words[0] == adverb[0] or words[-4] == adverb[0]
        # Article and adjective ending of each noun phrase follow its noun's gender.
        start = 1 if words[0] == adverb[0] else 0
        for phrase_ids in (words[start : start + 4], words[start + 4 : start + 8]):
            article, noun, stem, end = phrase_ids
            assert stem == adjective[0]
            gender = {first.spelling[0]: 0, second.spelling[0]: 2}[noun]
            wrong = list(words)
            for other in range(task.vocab_size):
                wrong[words.index(article)] = other
                assert task.is_valid(sentence, wrong) == (other == article)
            assert end == task.vocab_size - 4 - 6 + gender * 2
