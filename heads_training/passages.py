"""Tasks about passages that the target writes first: summaries, translations, extraction, code, ..

Heads are short of variety. A target left to itself writes short questions; here it is asked for a
passage (an article, an email, a table, code, ..) on a drawn subject, and a template wraps that
into a user turn with a long context, as users have them. All words below are this project's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from heads_training.prompts import Prompt

SUBJECTS = (
    "a city's new tram line", "bees and their keepers", "the history of glass",
    "a strike at a harbour", "sleep and memory", "a village school", "deep-sea cables",
    "an election in a small country", "coffee prices", "a lost climber", "solar power at night",
    "a violin maker", "the rules of a board game", "vaccines for cattle", "a football final",
    "river floods", "an old bakery", "satellites in low orbit", "a court case about noise",
    "learning to swim as an adult", "a museum theft", "soil and worms", "the price of housing",
    "a family recipe", "a hospital's waiting list", "cycling in winter", "a new phone",
    "the moon's far side", "a merger of two banks", "forest fires", "a comic book artist",
    "bread in the Middle Ages", "a wedding in the rain", "self-driving lorries", "tax returns",
    "a stray dog", "wind turbines off the coast", "an opera singer's career", "chess computers",
    "antibiotics", "a broken lift", "trade along a desert route", "a data breach", "tea farming",
    "a night train", "volcanoes", "a start-up that failed", "the invention of the zip",
    "school lunches", "a lighthouse",
)  # fmt: skip
LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch")

# Kind of passage -> (what the target is asked for, longest passage in tokens).
_PASSAGES = {
    "article": ("Write a news article of three paragraphs about {subject}.", 320),
    "report": ("Write one page of a report, with figures and dates, about {subject}.", 320),
    "story": ("Write the first two paragraphs of a story about {subject}.", 256),
    "email": ("Write an email from one colleague to another about {subject}.", 192),
    "talk": ("Write a conversation of eight lines between two people about {subject}.", 256),
    "entry": ("Write an encyclopedia entry about {subject}.", 256),
    "abstract": ("Write the abstract of a scientific paper about {subject}.", 192),
    "review": ("Write a customer's review, three sentences long, about {subject}.", 96),
    "notes": ("Write short notes, as a list, from a meeting about {subject}.", 192),
    "sentence": ("Write two plain sentences about {subject}.", 64),
    "foreign": ("Write two sentences in {language} about {subject}.", 64),
    "code": ("Write a short Python function that a program about {subject} could need.", 192),
}  # fmt: skip


@dataclass(frozen=True)
class _Shape:
    """One kind of task: passages of some kind, and the user turns they may be wrapped into."""

    name: str
    weight: int
    passages: tuple[str, ...]  # one kind is drawn, for all passages of the task
    count: int  # passages a task
    templates: tuple[str, ...]  # {text}: the passages; {subject}, {language}: as drawn


_SHAPES = (
    _Shape(
        "summary", 5, ("article", "report", "story", "talk", "entry", "email"), 1,
        (
            "Give a summary of this text in three sentences.\n\n{text}",
            "{text}\n\nWhat are the main points of the text above? Answer in a short list.",
            "Shorten the following to one paragraph that a busy reader can use:\n\n{text}",
            "Read this and write a headline and a two-sentence lead for it.\n\n{text}",
            "TEXT:\n{text}\n\nSUMMARY:",
        ),
    ),
    _Shape(
        "translation", 4, ("sentence", "review"), 1,
        (
            "How do you say this in {language}?\n\n{text}",
            "Please put the following into {language}: {text}",
            "English: {text}\n{language}:",
        ),
    ),
    _Shape(
        "translation-back", 3, ("foreign",), 1,
        (
            "What does this mean in English?\n\n{text}",
            "{text}\n\nThe text above is in {language}. Give it in English.",
        ),
    ),
    _Shape(
        "extraction", 4, ("article", "report", "email", "notes", "abstract"), 1,
        (
            "List every name, place and date in this text, one a line.\n\n{text}",
            "From the text below, make a JSON object with the keys title, people, places and "
            "numbers.\n\n{text}",
            "{text}\n\nWho does what in this text? Make a table with two columns.",
            "Which questions does the following text answer? Write three of them, each with its "
            "answer.\n\n{text}",
        ),
    ),
    _Shape(
        "retrieval", 5, ("entry", "article", "report"), 3,
        (
            "Use only these documents.\n\n{text}\n\nWhat do they say about {subject}?",
            "{text}\n\nQuestion: what matters most about {subject}? Name the document that each "
            "part of your answer comes from.",
            "You are given search results. Answer in two or three sentences, or say that they do "
            "not tell.\n\n{text}\n\nQuestion: how did {subject} begin?",
        ),
    ),
    _Shape(
        "code", 4, ("code",), 1,
        (
            "Explain what this code does, step by step.\n\n{text}",
            "{text}\n\nAdd a docstring and type hints to the function above.",
            "Write unit tests for the following code:\n\n{text}",
            "Is there a mistake in this code? Give a corrected version.\n\n{text}",
            "Rewrite this in JavaScript.\n\n{text}",
        ),
    ),
    _Shape(
        "rewriting", 3, ("email", "story", "notes", "review", "abstract"), 1,
        (
            "Make this sound more polite:\n\n{text}",
            "Rewrite the following so that a ten-year-old understands it.\n\n{text}",
            "{text}\n\nContinue this text with one more paragraph.",
            "Turn this into a short dialogue.\n\n{text}",
        ),
    ),
    _Shape(
        "judging", 2, ("review",), 3,
        (
            "Is each of these reviews positive, negative or mixed?\n\n{text}",
            "{text}\n\nWhich of these customers is the happiest, and why?",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A user turn that waits for its passages."""

    kind: str
    requests: tuple[str, ...]  # what the target is asked to write, one a passage
    passage_tokens: int  # longest passage
    template: str  # the user turn, `{text}` still open

    def prompt(self, passages: Sequence[str]) -> Prompt:
        """The task with its passages in place, several of them numbered."""
        text = passages[0]
        if len(passages) > 1:
            text = "\n\n".join(f"[{i}] {passage}" for i, passage in enumerate(passages, start=1))
        content = self.template.replace("{text}", text)
        return Prompt(({"role": "user", "content": content},), f"passages:{self.kind}")


def pick_tasks(count: int, seed: int) -> list[Task]:
    """`count` tasks, kinds drawn by weight; the same for one seed."""
    rng = random.Random(seed)
    weights = [shape.weight for shape in _SHAPES]
    return [_make(rng, shape) for shape in rng.choices(_SHAPES, weights, k=count)]


def _make(rng: random.Random, shape: _Shape) -> Task:
    """One task of this shape."""
    request, limit = _PASSAGES[rng.choice(shape.passages)]
    # Several documents are about different things: the question is about one of them.
    subjects = rng.sample(SUBJECTS, shape.count)
    words = {"subject": rng.choice(subjects), "language": rng.choice(LANGUAGES)}
    template = rng.choice(shape.templates)
    for name, word in words.items():
        template = template.replace("{" + name + "}", word)
    requests = (request.format(subject=s, language=words["language"]) for s in subjects)
    return Task(shape.name, tuple(requests), limit // shape.count, template)
