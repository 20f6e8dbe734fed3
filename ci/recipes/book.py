# SPDX-License-Identifier: Apache-2.0
"""The recipes, as docs/recipes/recipes.toml has them."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
_MODEL_FLAGS = ("--model-path", "--model")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_LAUNCHERS = (
    ("vllm", "serve"),
    ("sglang", "serve"),
    ("python", "-m", "sglang.launch_server"),
    ("python3", "-m", "sglang.launch_server"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """A serving command, taken apart."""

    environment: tuple[str, ...]
    launcher: tuple[str, ...]
    model: str
    flags: tuple[str, ...]
    """All but the model's name."""

    @classmethod
    def parse(cls, text: str) -> Command:
        """Take a command line apart.

        Raises:
            ValueError: if it starts neither engine, or names no model.
        """
        words = shlex.split(text)
        first = next(i for i, word in enumerate(words) if not _ASSIGNMENT.match(word))
        rest = tuple(words[first:])
        for launcher in _LAUNCHERS:
            if rest[: len(launcher)] == launcher:
                model, flags = _model_of(rest[len(launcher) :], launcher)
                return cls(tuple(words[:first]), launcher, model, flags)
        raise ValueError(f"{text!r} starts neither engine")

    def without(self, names: Sequence[str]) -> Command:
        """The command without flags of these names, and their values.

        Raises:
            ValueError: for a flag that it does not have.
        """
        kept = tuple(
            w for group in self.groups() if group[0] not in names for w in group
        )
        missing = set(names) - {group[0] for group in self.groups()}
        if missing:
            raise ValueError(f"{self.model}: there is no {sorted(missing)} to drop")
        return Command(self.environment, self.launcher, self.model, kept)

    def renamed(self, names: Mapping[str, str]) -> Command:
        """The command with flags under other names."""
        return replace(self, flags=tuple(names.get(word, word) for word in self.flags))

    def adding(self, words: Sequence[str]) -> Command:
        """The command with these words at its end."""
        return replace(self, flags=(*self.flags, *words))

    def groups(self) -> list[tuple[str, ...]]:
        """Each flag with its values."""
        found: list[list[str]] = []
        for word in self.flags:
            if _is_flag(word) or not found:
                found.append([word])
            else:
                found[-1].append(word)
        return [tuple(group) for group in found]

    def lines(self) -> list[str]:
        """It as a shell takes it, a flag in each line."""
        named = [self.model] if self.launcher[0] == "vllm" else []
        named = named or ["--model-path", self.model]
        head = " ".join((*self.environment, *self.launcher, *named))
        parts = [head, *(shlex.join(group) for group in self.groups())]
        return [f"{part} \\" for part in parts[:-1]] + parts[-1:]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A published command, and what is said of it."""

    id: str
    family: str
    engine: str
    shape: str
    source: str
    published: Command
    gpus: int
    gpu: str
    beside: Mapping[str, str]
    """Shapes of other models that the command names."""
    renamed: Mapping[str, str]
    drop: tuple[str, ...]
    add: tuple[str, ...]
    environment: tuple[str, ...]
    layers_on_gpu: str | None
    """Of what a run of such layers printed on a GPU, the file in benchmarks/results."""

    @property
    def command(self) -> Command:
        """Every flag of it, under the names that the engine's version has."""
        command = self.published.renamed(self.renamed)
        return command.adding(["--enable-hybrid-plugin"]) if self.on_sglang else command

    @property
    def changed(self) -> Command | None:
        """What to serve where the plugin refuses the command; None if not given."""
        if not (self.drop or self.add or self.environment):
            return None
        changed = self.command.without(self.drop).adding(self.add)
        environment = (*changed.environment, *self.environment)
        return replace(changed, environment=environment)

    @property
    def weights(self) -> str | None:
        """ "nvfp4" if the model's weights are, which its name tells; None if not."""
        return "nvfp4" if "NVFP4" in self.published.model else None

    @property
    def on_sglang(self) -> bool:
        """Whether SGLang serves it, else vLLM."""
        return self.engine == "sglang"


def load(path: Path = FOLDER / "recipes.toml") -> list[Recipe]:
    """All recipes, in the file's order.

    Raises:
        ValueError: for a recipe that is not well formed.
    """
    book = tomllib.loads(path.read_text())
    recipes = [_recipe(entry, book["layers_on_gpu"]) for entry in book["recipe"]]
    ids = [recipe.id for recipe in recipes]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"ids appear twice: {twice}")
    return recipes


def _recipe(
    entry: Mapping[str, Any], on_gpu: Mapping[str, Mapping[str, str]]
) -> Recipe:
    instead = entry.get("instead", {})
    return Recipe(
        id=entry["id"],
        family=entry["family"],
        engine=entry["engine"],
        shape=entry["shape"],
        source=entry["source"],
        published=Command.parse(entry["command"]),
        gpus=entry["gpus"],
        gpu=entry.get("gpu", "H100"),
        beside=entry.get("beside", {}),
        renamed=entry.get("renamed", {}),
        drop=tuple(instead.get("drop", ())),
        add=tuple(instead.get("add", ())),
        environment=tuple(instead.get("environment", ())),
        layers_on_gpu=on_gpu[entry["engine"]].get(entry["shape"]),
    )


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in ("-dp", "-tp")


def _model_of(
    words: tuple[str, ...], launcher: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """The model's name, and the words without it."""
    if launcher[0] == "vllm":
        return words[0], words[1:]
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in _MODEL_FLAGS:
            if value:
                return value, (*words[:i], *words[i + 1 :])
            return words[i + 1], (*words[:i], *words[i + 2 :])
    raise ValueError(f"{words} names no model")
