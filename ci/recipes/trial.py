# SPDX-License-Identifier: Apache-2.0
"""Takes recipes through an engine's arguments, the plugin's activation and planning."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_plugin.engine import host_memory
from recipes.book import Command, Recipe
from recipes.shapes import write

SERVED = "served"
UNPLANNED = "not planned"
"""Activated, but no layout came of it here: it counts as no success."""
CACHE_BYTES = 32 << 30
"""Of both pools on a rank."""
HOST_BYTES = 2 << 40
"""Memory of the machine that is pretended."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one command."""

    outcome: str
    """A `Prospect`, or `UNPLANNED`."""
    words: str = ""
    """The plugin's or engine's sentence, if it is not served."""
    page_size: int | None = None
    """Tokens in a page, where it was planned."""

    def as_json(self) -> dict[str, Any]:
        """It without what is not there."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a recipe."""

    published: Verdict
    changed: Verdict | None = None
    """With the change that the recipe names."""

    def as_json(self) -> dict[str, Any]:
        """It without what is not there."""
        found = {"published": self.published.as_json()}
        return found | ({"changed": self.changed.as_json()} if self.changed else {})


def try_all(engine: str, recipes: Sequence[Recipe]) -> Iterator[tuple[Recipe, Outcome]]:
    """Try each recipe of an engine, in this process, which is of no other use then.

    Args:
        engine: "vllm" or "sglang".
        recipes: of any engine.
    """
    machine = importlib.import_module(f"recipes.{engine}_gpu")
    host_memory.free_bytes = _free_bytes
    mine = [recipe for recipe in recipes if recipe.engine == engine]
    # Nothing is unlearnt of a kind of GPU: each has its recipes in turn.
    for i, gpu in enumerate(dict.fromkeys(recipe.gpu for recipe in mine)):
        (machine.become if i else machine.pretend)(gpu)
        for recipe in (r for r in mine if r.gpu == gpu):
            yield recipe, _outcome(recipe)


def _free_bytes(root: Path = Path()) -> int:
    return HOST_BYTES


def _outcome(recipe: Recipe) -> Outcome:
    published = _try(recipe, recipe.command)
    changed = recipe.changed
    if changed is None or published.outcome == SERVED:
        return Outcome(published)
    return Outcome(published, _try(recipe, changed))


def _try(recipe: Recipe, command: Command) -> Verdict:
    outlook = importlib.import_module(f"hybrid_plugin.{recipe.engine}.outlook")
    with tempfile.TemporaryDirectory() as name, _environment(command):
        folder = write(Path(name, "model"), recipe.shape, recipe.weights)
        others = {
            other: str(write(Path(name, shape), shape))
            for other, shape in recipe.beside.items()
        }
        flags = [_here(_with(word, others), command, folder) for word in command.flags]
        found = outlook.foresee(str(folder), flags, CACHE_BYTES)
    if found.prospect.value != SERVED:
        return Verdict(found.prospect.value, _sentence(found.reason))
    if found.layout is None or found.sizes is None:
        return Verdict(UNPLANNED, _sentence(found.note))
    return Verdict(SERVED, page_size=found.layout.page_size)


_PARSER = """\
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser


@ReasoningParserManager.register_module("{name}")
class Parser(DeepSeekR1ReasoningParser):
    pass
"""
"""A file that a checkpoint brings along and a flag of vLLM names."""


def _with(word: str, others: Mapping[str, str]) -> str:
    """A flag's value, or the JSON in it, with folders in place of other models."""
    for name, folder in others.items():
        word = word.replace(name, folder)
    return word


def _here(word: str, command: Command, folder: Path) -> str:
    """A flag's value that names what only the model's real folder has."""
    if word == command.model:
        return str(folder)
    if not word.endswith("_reasoning_parser.py"):
        return word
    name = command.flags[command.flags.index("--reasoning-parser") + 1]
    Path(folder, word).write_text(_PARSER.format(name=name))
    return str(Path(folder, word))


@contextmanager
def _environment(command: Command) -> Iterator[None]:
    """What the command sets; what the engines leave there is taken away again."""
    before = dict(os.environ)
    for item in command.environment:
        name, _, value = item.partition("=")
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _sentence(text: str) -> str:
    """The first paragraph, without names of temporary folders and of who says it."""
    text = re.sub(r"/\S*/model\b", "MODEL", text.strip().split("\n\n")[0])
    text = text.removeprefix("hybrid-plugin: ").removeprefix("it cannot serve this: ")
    return " ".join(text.split())
