# SPDX-License-Identifier: Apache-2.0
"""What the demo asks: facts to remember, and questions about them.

The bundled model was trained on chats that state facts and ask for them later,
so every question has one right answer, which the model can only give from
what it keeps of tokens hundreds of positions back.  One byte is one token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Message = Mapping[str, str]

_THINGS_TEXT = (
    "amber basil birch cedar cobalt coral cotton crimson delta ember falcon fern "
    "flint garnet ginger granite harbor hazel indigo iris ivory jade jasmine lemon "
    "linen lotus maple marble meadow mint nectar olive onyx opal orchid pearl pepper "
    "pine plum quartz raven reef river ruby saffron sage silver slate tiger topaz"
)
THINGS = _THINGS_TEXT.split()

SENTENCES = (
    "The module reads a file and returns its lines in order.",
    "If the argument is missing, a default value is used.",
    "An exception is raised when the name is not found.",
    "The result is a new list; the original is left alone.",
    "Use this function to open a connection to a server.",
    "Every object has a type, which does not change.",
    "The second form takes a sequence of pairs.",
    "Note that the order of the items is not defined.",
)


BURST_TOKENS = 1100
"""Of a prompt of the burst."""
BURST_S = 30
"""On each server: the whole demo is to take a few minutes."""
LEAST_AT_ONCE, MOST_AT_ONCE = 16, 64
"""Five to seven of these prompts fit."""


@dataclass(frozen=True)
class Question:
    """A user's message, and how a right answer begins."""

    text: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """Questions asked one after the other, each with all that came before."""

    opening: tuple[Message, ...]
    """Messages before the first question."""
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Workload:
    """Conversations sent to a server, so many at a time."""

    name: str
    label: str
    """One word, for narrow columns."""
    title: str
    conversations: tuple[Conversation, ...]
    concurrency: int
    max_tokens: int = 16
    shares: bool = True
    """Whether prompts have a beginning in common."""

    @property
    def requests(self) -> int:
        """How many requests it sends."""
        return sum(len(c.questions) for c in self.conversations)


class Facts:
    """Codes of things, drawn without repetition from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._codes: dict[str, str] = {}

    def state(self, count: int) -> str:
        """State new facts, one a line."""
        unknown = [thing for thing in THINGS if thing not in self._codes]
        new = {
            thing: f"{self._random.randrange(10000):04d}"
            for thing in self._random.sample(unknown, count)
        }
        self._codes |= new
        return "\n".join(f"The code for {t} is {c}." for t, c in new.items())

    def ask(self) -> Question:
        """Ask for one of the facts stated so far."""
        thing = self._random.choice(list(self._codes))
        return Question(f"What is the code for {thing}?", self._codes[thing])

    def filler(self, size: int) -> str:
        """At least `size` bytes of text that has nothing to do with the facts."""
        text = self._random.choice(SENTENCES)
        while len(text) < size:
            text += " " + self._random.choice(SENTENCES)
        return text


def message(role: str, content: str) -> Message:
    """One message of a chat."""
    return {"role": role, "content": content}


def shared_prompt(requests: int = 40, tokens: int = 200) -> Workload:
    """Many users, one system prompt of exactly so many tokens."""
    facts = Facts(seed=1)
    codes = facts.state(5)
    rest = tokens - len(codes) - len("\n")
    system = f"{facts.filler(rest)[:rest]}\n{codes}"
    opening = (message("system", system),)
    return Workload(
        "shared_system_prompt",
        "shared",
        f"{requests} prompts, one {tokens}-token system prompt",
        tuple(Conversation(opening, (facts.ask(),)) for _ in range(requests)),
        concurrency=4,
    )


def chats(count: int = 10, turns: int = 6) -> Workload:
    """Chats that go on: every turn has all earlier questions and answers."""
    return Workload(
        "chats",
        "chats",
        f"{count} chats of {turns} turns",
        tuple(_chat(seed, turns) for seed in range(100, 100 + count)),
        concurrency=4,
    )


def returning(count: int = 16, turns: int = 3) -> Workload:
    """Long chats that all come back, each after all others have had their turn."""
    return Workload(
        "returning_chats",
        "chats",
        f"{count} long chats that come back",
        tuple(_chat(seed, turns, 900) for seed in range(200, 200 + count)),
        concurrency=2,
    )


def split(count: int = 8) -> Workload:
    """Long prompts, each of which one server computes and another one answers.

    So long that computing one takes longer than reading it: otherwise the server that
    answers computes it, too.
    """
    return Workload(
        "prefill_and_decode",
        "prefill, decode",
        f"{count} prompts that one server computes and another answers",
        tuple(_chat(seed, 1, 3000) for seed in range(300, 300 + count)),
        concurrency=2,
    )


def _chat(seed: int, turns: int, filler: int = 200) -> Conversation:
    facts = Facts(seed)
    first = f"{facts.state(4)}\n{facts.filler(filler)}\n"
    questions = [facts.ask() for _ in range(turns)]
    questions[0] = Question(first + questions[0].text, questions[0].answer)
    return Conversation((), tuple(questions))


def prompt_tree(limbs: int = 3, twigs: int = 3, leaves: int = 4) -> Workload:
    """Prompts that share a trunk, part in the middle, and part again."""
    trunk = Facts(seed=2)
    base = f"{trunk.state(2)}\n{trunk.filler(200)}\n"
    paths = []
    for limb in range(limbs):
        text = base + _limb(f"Part {limb}.", 10 + limb)
        for twig in range(twigs):
            whole = text + _limb(f"Section {limb}.{twig}.", 100 + 10 * limb + twig)
            for leaf in range(leaves):
                asked = Facts(seed=2)
                asked.state(2)
                for _ in range(leaf):
                    asked.ask()
                question = asked.ask()
                paths.append(Question(whole + question.text, question.answer))
    random.Random(3).shuffle(paths)
    return Workload(
        "prompt_tree",
        "tree",
        f"{len(paths)} prompts that branch in the middle",
        tuple(Conversation((), (path,)) for path in paths),
        concurrency=4,
    )


def _limb(heading: str, seed: int) -> str:
    return f"{heading} {Facts(seed).filler(150)}\n"


def burst(requests: int = MOST_AT_ONCE, tokens: int = BURST_TOKENS) -> Workload:
    """Everybody at once, each with a long prompt of their own."""
    conversations = []
    for seed in range(1000, 1000 + requests):
        facts = Facts(seed)
        codes, question = facts.state(3), facts.ask()
        rest = tokens - len(codes) - len(question.text) - 2
        text = f"{codes}\n{facts.filler(rest)[:rest]}\n{question.text}"
        conversations.append(Conversation((), (Question(text, question.answer),)))
    return Workload(
        "burst",
        "burst",
        f"{requests} requests at once, a pool for few",
        tuple(conversations),
        concurrency=requests,
        shares=False,
    )


def burst_of(tokens_per_s: float) -> Workload:
    """A burst that takes `BURST_S` where prompts are computed at this rate.

    It has enough requests to wait for room on any machine.
    """
    requests = int(BURST_S * tokens_per_s / BURST_TOKENS)
    return burst(min(max(requests, LEAST_AT_ONCE), MOST_AT_ONCE))


def sharing_workloads() -> Sequence[Workload]:
    """Those whose prompts have something in common, in order."""
    return (shared_prompt(), chats(), prompt_tree())


def all_workloads() -> Sequence[Workload]:
    """The four workloads of the demo, in order."""
    return (*sharing_workloads(), burst())
