# SPDX-License-Identifier: Apache-2.0
"""Training data: Python's own documentation, and recall tasks made from it.

The text ships inside every Python installation: `pydoc_data.topics`, the
docstrings of the standard library and its source code (Python Software
Foundation License). The recall tasks are generated: facts,
then filler text, then questions that only those facts can answer.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import random
import string
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from network import END_OF_TEXT, IM_END, IM_START

SKIP = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}

# fmt: off
THINGS_TEXT = (
    "amber basil birch cedar cobalt coral cotton crimson delta ember falcon fern "
    "flint garnet ginger granite harbor hazel indigo iris ivory jade jasmine "
    "juniper kelp lagoon laurel lemon lilac linen lotus maple marble meadow mint "
    "nectar nickel olive onyx opal orchid pearl pepper pine plum quartz raven reef "
    "river ruby saffron sage silver slate tiger topaz tulip velvet violet walnut "
    "willow winter zephyr"
)
PEOPLE_TEXT = (
    "Ada Alan Anna Boris Carla Clara David Diego Elena Emil Erik Fatima Felix Greta "
    "Hana Hugo Ida Ivan Jana Jonas Karim Kenji Lara Leo Lina Luca Maria Marta Mira "
    "Nadia Nils Nora Omar Oscar Paula Petra Rosa Samir Sara Simon Sofia Tara Theo "
    "Tom Uma Vera Viktor Wanda Yara Zoe"
)
CITIES_TEXT = (
    "Athens Berlin Bern Boston Cairo Dakar Delhi Dublin Geneva Hanoi Havana "
    "Helsinki Istanbul Jakarta Kyiv Lagos Lima Lisbon London Madrid Manila Milan "
    "Mumbai Nairobi Naples Osaka Oslo Ottawa Paris Perth Porto Prague Quito Riga "
    "Rome Seoul Sofia Sydney Tallinn Tokyo Tunis Turin Vienna Vilnius Warsaw Zagreb "
    "Zurich"
)
# fmt: on
THINGS, PEOPLE, CITIES = THINGS_TEXT.split(), PEOPLE_TEXT.split(), CITIES_TEXT.split()

TEXT, FACT, RANDOM, PROMPT, ANSWER = 1.0, 0.3, 0.05, 0.3, 5.0
"""Loss weights: random digits hardly count, what must be recalled counts most."""


def corpus() -> tuple[list[str], list[str]]:
    """Every documentation text and source file of this Python's standard library."""
    texts: set[str] = set()
    sources: set[str] = set()
    with contextlib.suppress(ImportError):
        texts.update(importlib.import_module("pydoc_data.topics").topics.values())
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if SKIP.intersection(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        if "encodings" not in path.parts:
            sources.add(source)
        for node in ast.walk(tree):
            if isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                texts.add(inspect.cleandoc(ast.get_docstring(node) or ""))
    return stable(texts), stable(sources)


def stable(texts: set[str]) -> list[str]:
    """The longer texts, in an order that only their content decides."""
    kept = [text.strip() for text in texts if len(text) > 60 and "\0" not in text]
    return sorted(kept, key=lambda text: hashlib.sha256(text.encode()).digest())


@dataclass
class Corpus:
    """Text to train on, and held-out documentation (4 % of it)."""

    docs: str
    code: str
    held_out: str

    def summary(self) -> dict[str, object]:
        """Sizes and a checksum, for the record."""
        whole = self.docs + self.code + self.held_out
        return {
            "documentation_bytes": len(self.docs.encode()),
            "source_bytes": len(self.code.encode()),
            "held_out_bytes": len(self.held_out.encode()),
            "sha256": hashlib.sha256(whole.encode()).hexdigest(),
        }


def load_corpus() -> Corpus:
    """Collect and split."""
    texts, sources = corpus()
    held = {t for t in texts if hashlib.sha256(t.encode()).digest()[-1] % 25 == 0}
    # docstrings are in source files too: leave out files that quote a held-out text
    quoted = {t.strip().splitlines()[0][:60] for t in held}
    clean = [s for s in sources if not any(q in s for q in quoted if len(q) > 30)]
    join = "\n\n".join
    return Corpus(
        join(t for t in texts if t not in held),
        join(clean),
        join(t for t in texts if t in held),
    )


@dataclass
class Document:
    """Tokens, the weight of each in the loss, and whether far attention may see it."""

    tokens: list[int] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)

    def add(self, text: str, weight: float, hidden: bool = False) -> None:
        """Append text."""
        data = text.encode()
        self.tokens.extend(data)
        self.weight.extend([weight] * len(data))
        self.hidden.extend([hidden] * len(data))

    def mark(self, token: int, weight: float) -> None:
        """Append a special token."""
        self.tokens.append(token)
        self.weight.append(weight)
        self.hidden.append(False)

    def open(self, role: str) -> None:
        """Begin a chat turn."""
        self.mark(IM_START, PROMPT)
        self.add(role + "\n", PROMPT)

    def close(self, weight: float) -> None:
        """End a chat turn."""
        self.mark(IM_END, weight)
        self.add("\n", PROMPT)

    def answer(self, text: str) -> None:
        """A whole assistant turn; its content is what must be recalled."""
        self.open("assistant")
        self.add(text, ANSWER, hidden=True)
        self.close(ANSWER / 2)


@dataclass
class Fact:
    """One thing to remember: how it is said, asked and answered."""

    before: str
    value: str
    after: str
    question: str

    def say(self, to: Document, weight: float = RANDOM) -> None:
        """State the fact."""
        to.add(self.before, FACT, hidden=True)
        to.add(self.value, weight, hidden=True)
        to.add(self.after, FACT, hidden=True)


class Source:
    """A seeded stream of documents."""

    def __init__(self, texts: list[str], seed: int) -> None:
        self.texts = texts
        self.random = random.Random(seed)

    def filler(self, size: int) -> str:
        """A piece of at most `size` characters of text, cut at spaces."""
        text = self.random.choice(self.texts)
        start = self.random.randrange(len(text) - size - 80)
        start = text.find(" ", start) + 1
        end = text.rfind(" ", start, start + size)
        return text[start : max(end, start + 1)].strip()

    def facts(self, codes: int, homes: int, phrases: int) -> list[Fact]:
        """Distinct facts in random order."""
        rng = self.random
        out = []
        for thing in rng.sample(THINGS, codes):
            code = "".join(rng.choices(string.digits, k=4))
            question = f"What is the code for {thing}?"
            out.append(Fact(f"The code for {thing} is ", code, ".", question))
        for person, city in zip(
            rng.sample(PEOPLE, homes), rng.sample(CITIES, homes), strict=True
        ):
            out.append(
                Fact(f"{person} lives in ", city, ".", f"Where does {person} live?")
            )
        for _ in range(phrases):
            words = " ".join(rng.sample(THINGS, rng.randint(2, 4)))
            out.append(Fact("The phrase is ", words, ".", "What is the phrase?"))
        rng.shuffle(out)
        return out

    def gap(self, to: Document, most: int) -> None:
        """Filler text, or now and then none."""
        if most >= 20 and self.random.random() < 0.8:
            size = int(20 * (most / 20) ** self.random.random())
            to.add(self.filler(size), TEXT / 2)
            to.add("\n", PROMPT)

    def chat(self, most: int, size: int) -> Document:
        """A dialogue whose answers depend on facts up to `size` bytes back."""
        rng = self.random
        doc = Document()
        hard = min(1.0, most / 400)
        codes = rng.randint(1, 2 + round(4 * hard))
        facts = self.facts(
            codes, rng.randint(0, 1 + round(2 * hard)), int(rng.random() < 0.3)
        )
        if rng.random() < 0.3:
            doc.open("system")
            self.gap(doc, most // 2)
            doc.add("You answer from memory.", PROMPT)
            doc.close(PROMPT)
        doc.open("user")
        self.gap(doc, most)
        for fact in facts:
            fact.say(doc)
            doc.add("\n", PROMPT)
            if rng.random() < 0.4:
                self.gap(doc, most // 2)
        self.gap(doc, most)
        if rng.random() < 0.5:
            doc.add("Remember this.", PROMPT)
            doc.close(PROMPT)
            doc.open("assistant")
            doc.add("Noted.", TEXT)
            doc.close(TEXT)
            doc.open("user")
            self.gap(doc, most)
        last = ""
        while True:
            kind = rng.random()
            if kind < 0.12 and codes > 1:
                said = [
                    fact
                    for fact in facts
                    if fact.question.startswith("What is the code")
                ]
                question = "List all codes."
                parts = [f"{fact.before[13:-4]} {fact.value}" for fact in said]
                reply = ", ".join(parts)
            elif kind < 0.24 and last:
                question, reply = "Repeat your last answer.", last
            else:
                fact = rng.choice(facts)
                question, reply = fact.question, fact.value
            doc.add(question, PROMPT)
            doc.close(PROMPT)
            doc.answer(reply)
            last = reply
            if len(doc.tokens) > size or rng.random() < 0.15:
                break
            doc.open("user")
            self.gap(doc, most)
        doc.mark(END_OF_TEXT, PROMPT)
        return doc

    def plain(self, most: int) -> Document:
        """Facts in running text, stated again later."""
        rng = self.random
        doc = Document()
        hard = min(1.0, most / 400)
        count = rng.randint(1, 2 + round(3 * hard))
        facts = self.facts(count, rng.randint(0, 2), 0)
        for fact in facts:
            fact.say(doc)
            doc.add(" ", PROMPT)
            if rng.random() < 0.3:
                self.gap(doc, most // 2)
        self.gap(doc, most)
        for _ in range(rng.randint(1, 4)):
            rng.choice(facts).say(doc, ANSWER)
            doc.add(" ", PROMPT)
            self.gap(doc, most // 2)
        doc.mark(END_OF_TEXT, PROMPT)
        return doc

    def copy(self, most: int) -> Document:
        """Words, filler, the same words again."""
        rng = self.random
        doc = Document()
        words = rng.choices(
            THINGS, k=rng.randint(2, 4 + round(8 * min(1.0, most / 400)))
        )
        listed = "Words: " + ", ".join(words) + ".\n"
        doc.add(listed, RANDOM, hidden=True)
        self.gap(doc, most // 2)
        doc.add("Words: ", PROMPT)
        doc.add(listed[7:], ANSWER / 2, hidden=True)
        doc.mark(END_OF_TEXT, PROMPT)
        return doc

    def document(self, progress: float) -> Document:
        """One document; distances and counts grow with `progress` (0 to 1)."""
        rng = self.random
        # the curriculum: filler of at most 20 bytes at first, 700 from 35 % on
        most = int(20 * 35 ** min(1.0, progress / 0.35))
        most = int(most * rng.random() ** 0.5) if rng.random() < 0.5 else most
        kind = rng.random()
        if kind < 0.5:
            # many short dialogues or a few long ones
            return self.chat(most, rng.choice([200, 600, 1200, 1800]))
        if kind < 0.65:
            return self.plain(most)
        if kind < 0.75:
            return self.copy(most)
        doc = Document()
        doc.add(self.filler(rng.choice([300, 800, 1600])), TEXT)
        doc.mark(END_OF_TEXT, PROMPT)
        return doc


@dataclass
class Batch:
    """Rows of packed documents, one token longer than the network's input."""

    tokens: np.ndarray
    weight: np.ndarray
    hidden: np.ndarray


def make_batch(source: Source, rows: int, length: int, progress: float) -> Batch:
    """Pack documents into rows of `length` + 1 tokens."""
    batch = Batch(
        np.zeros((rows, length + 1), np.int16),
        np.zeros((rows, length + 1), np.float32),
        np.zeros((rows, length + 1), np.bool_),
    )
    for row in range(rows):
        packed = Document()
        while len(packed.tokens) <= length:
            doc = source.document(progress)
            packed.tokens += doc.tokens
            packed.weight += doc.weight
            packed.hidden += doc.hidden
        batch.tokens[row] = packed.tokens[: length + 1]
        batch.weight[row] = packed.weight[: length + 1]
        batch.hidden[row] = packed.hidden[: length + 1]
    return batch


@dataclass
class Probe:
    """A dialogue that ends where the answer begins."""

    tokens: list[int]
    """The prompt, as the chat template renders it."""
    cut: int
    """A position after the last fact and before the question."""
    answer: str


def probes(text: str, seed: int, count: int, low: int, high: int) -> list[Probe]:
    """Recall questions about one of four codes, stated `low` to `high` bytes back.

    Every probe is one dialogue: four codes and filler, "Noted.", the question.
    The distance is measured from the end of the asked fact to the answer.
    """
    source = Source([text], seed)
    out: list[Probe] = []
    while len(out) < count:
        rng = source.random
        doc = Document()
        facts = source.facts(4, 0, 0)
        asked = rng.choice(facts)
        doc.open("user")
        ends = {}
        for fact in facts:
            fact.say(doc)
            ends[fact.question] = len(doc.tokens)
            doc.add("\n", PROMPT)
        size = rng.randint(low, high) - 100
        if size > 20:
            doc.add(source.filler(size) + "\n", TEXT)
        doc.add("Remember this.", PROMPT)
        doc.close(PROMPT)
        cut = len(doc.tokens)
        doc.open("assistant")
        doc.add("Noted.", TEXT)
        doc.close(TEXT)
        doc.open("user")
        doc.add(asked.question, PROMPT)
        doc.close(PROMPT)
        doc.open("assistant")
        if low <= len(doc.tokens) - ends[asked.question] <= high:
            out.append(Probe(doc.tokens, cut, asked.value))
    return out
