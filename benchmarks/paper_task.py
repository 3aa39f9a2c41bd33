"""A small translation task with many right answers, for `benchmarks.paper_table`.

The source language puts subject, verb, object, adverb; the target language puts the verb last and
the adverb first or before the verb. Target words are spelt in one to three pieces. Most source
words have two or three translations, drawn at random; a noun's translations differ in gender, and
its article and adjective agree with the one that was drawn. So text is predictable inside a word
and unpredictable between words, unless one always hears the same translator: what distillation is
for.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

EOS, ARROW = 0, 1  # ids; ARROW ends the source
_FIRST_WORD = 2
_GENDERS, _NUMBERS = 3, 2
_PIECES = 40  # pieces that target words are spelt with
_NEXT_BEST = 0.75  # how often a translation is drawn, relative to the one before it

Piece = int
Spelling = tuple[Piece, ...]


@dataclass(frozen=True)
class Noun:
    """One translation of a noun."""

    spelling: Spelling
    gender: int


@dataclass(frozen=True)
class Phrase:
    """A noun phrase of the source: indices into the lexicon."""

    noun: int
    adjective: int | None
    plural: bool
    definite: bool


@dataclass(frozen=True)
class Clause:
    """Subject, verb, object and perhaps an adverb: indices into the lexicon."""

    subject: Phrase
    verb: int
    object: Phrase
    adverb: int | None


Sentence = tuple[Clause, ...]


class Task:
    """The two languages; the same for one seed."""

    nouns, adjectives, verbs, adverbs = 24, 12, 16, 8

    def __init__(self, seed: int = 0) -> None:
        """Make up the lexicon."""
        rng = random.Random(seed)
        start = _FIRST_WORD
        self.source_ids: dict[str, range] = {}
        for kind, count in (
            ("noun", self.nouns),
            ("adjective", self.adjectives),
            ("verb", self.verbs),
            ("adverb", self.adverbs),
            ("mark", 4),  # plural, definite, indefinite, and
        ):
            self.source_ids[kind] = range(start, start + count)
            start += count
        self._pieces = range(start, start + _PIECES)
        start += _PIECES
        self._articles = range(start, start + 2 * _GENDERS * _NUMBERS)
        start += len(self._articles)
        self._adjective_ends = range(start, start + _GENDERS * _NUMBERS)
        start += len(self._adjective_ends)
        self._plural_end, self._verb_ends = start, (start + 1, start + 2)
        self._and = start + 3
        self.vocab_size = start + 4
        self.noun_words = [
            [Noun(self._spell(rng), gender) for gender in rng.sample(range(_GENDERS), count)]
            for count in rng.choices((1, 2, 3), (1, 2, 2), k=self.nouns)
        ]
        self.adjective_words = self._words(rng, self.adjectives)
        self.verb_words = self._words(rng, self.verbs)
        self.adverb_words = self._words(rng, self.adverbs)

    def _spell(self, rng: random.Random) -> Spelling:
        return tuple(rng.choices(self._pieces, k=rng.choice((1, 2, 2, 3))))

    def _words(self, rng: random.Random, count: int) -> list[list[Spelling]]:
        return [
            [self._spell(rng) for _ in range(variants)]
            for variants in rng.choices((1, 2, 3), (2, 2, 1), k=count)
        ]

    def draw(self, rng: random.Random) -> Sentence:
        """One source sentence of one or two clauses."""

        def phrase() -> Phrase:
            adjective = rng.randrange(self.adjectives) if rng.random() < 0.5 else None
            return Phrase(
                rng.randrange(self.nouns), adjective, rng.random() < 0.4, rng.random() < 0.5
            )

        def clause() -> Clause:
            adverb = rng.randrange(self.adverbs) if rng.random() < 0.5 else None
            return Clause(phrase(), rng.randrange(self.verbs), phrase(), adverb)

        return tuple(clause() for _ in range(rng.choice((1, 2))))

    def source(self, sentence: Sentence) -> list[int]:
        """Its ids in the source language, ARROW included."""
        plural, definite, indefinite, conjunction = self.source_ids["mark"]

        def phrase(words: Phrase) -> list[int]:
            ids = [definite if words.definite else indefinite]
            if words.adjective is not None:
                ids.append(self.source_ids["adjective"][words.adjective])
            ids.append(self.source_ids["noun"][words.noun])
            return [*ids, plural] if words.plural else ids

        ids: list[int] = []
        for clause in sentence:
            ids += [conjunction] if ids else []
            ids += phrase(clause.subject)
            ids.append(self.source_ids["verb"][clause.verb])
            ids += phrase(clause.object)
            if clause.adverb is not None:
                ids.append(self.source_ids["adverb"][clause.adverb])
        return [*ids, ARROW]

    def translate(self, sentence: Sentence, rng: random.Random) -> list[int]:
        """One of its translations, drawn at random; EOS included."""
        ids: list[int] = []
        for clause in sentence:
            ids += [self._and] if ids else []
            forms = self._clause_forms(clause)
            order = rng.randrange(len(forms))
            for variants in forms[order]:
                weights = [_NEXT_BEST**place for place in range(len(variants))]
                ids += rng.choices(variants, weights)[0]
        return [*ids, EOS]

    def is_valid(self, sentence: Sentence, target: list[int]) -> bool:
        """Whether `target`, EOS included, is one of the translations."""
        clauses = [
            "|".join(
                "".join("(?:" + "|".join(map(_text, variants)) + ")" for variants in order)
                for order in self._clause_forms(clause)
            )
            for clause in sentence
        ]
        joined = re.escape(chr(self._and)).join(f"(?:{clause})" for clause in clauses)
        return re.fullmatch(joined + _text((EOS,)), "".join(map(chr, target))) is not None

    def _clause_forms(self, clause: Clause) -> list[list[list[Spelling]]]:
        """Its word orders; each a list of parts, each with all spellings that it may have."""
        subject, object_ = (self._phrase_forms(p) for p in (clause.subject, clause.object))
        end = self._verb_ends[clause.subject.plural]
        verb = [(*word, end) for word in self.verb_words[clause.verb]]
        if clause.adverb is None:
            return [[subject, object_, verb]]
        adverb = self.adverb_words[clause.adverb]
        return [[adverb, subject, object_, verb], [subject, object_, adverb, verb]]

    def _phrase_forms(self, phrase: Phrase) -> list[Spelling]:
        """Article, noun, adjective; one for each pair of a noun's and an adjective's words."""
        forms: list[Spelling] = []
        for noun in self.noun_words[phrase.noun]:
            agreement = noun.gender * _NUMBERS + phrase.plural
            article = self._articles[agreement + phrase.definite * _GENDERS * _NUMBERS]
            start = (article, *noun.spelling, *([self._plural_end] if phrase.plural else []))
            if phrase.adjective is None:
                forms.append(start)
                continue
            end = self._adjective_ends[agreement]
            forms += [(*start, *word, end) for word in self.adjective_words[phrase.adjective]]
        return forms


def _text(ids: Spelling) -> str:
    return "".join(re.escape(chr(i)) for i in ids)
