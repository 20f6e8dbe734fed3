# SPDX-License-Identifier: Apache-2.0
"""Commands taken apart and put together again, and the page that shows them."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recipes import book, document, trial
from recipes.book import Command, load
from recipes.shapes import SHAPES
from run_recipes import OUTCOMES, PAGE, ROOT

from hybrid_plugin.core.memory.layout import (
    AttentionGroup,
    CacheLayout,
    PoolSizes,
    StateGroup,
)
from hybrid_plugin.engine.outlook import Outlook, Prospect

RECIPES = load()
RECORDED = json.loads(OUTCOMES.read_text())
LAYOUT = CacheLayout(
    page_size=16,
    attention=(AttentionGroup(("a",), 512),),
    states=(StateGroup(("b",), 1024),),
)


@pytest.mark.parametrize(
    ("text", "environment", "model", "flags"),
    [
        ("vllm serve a/b --x 1 -dp 8", (), "a/b", ("--x", "1", "-dp", "8")),
        ("A=1 B=x=y sglang serve --tp 2 --model-path a/b --z", ("A=1", "B=x=y"), "a/b",
         ("--tp", "2", "--z")),
        ("python3 -m sglang.launch_server --model=a/b --tp 2", (), "a/b",
         ("--tp", "2")),
        ("vllm serve m --c '{\"a\": 1}'", (), "m", ("--c", '{"a": 1}')),
    ],
)  # fmt: skip
def test_a_command_is_taken_apart(
    text: str, environment: tuple[str, ...], model: str, flags: tuple[str, ...]
) -> None:
    command = Command.parse(text)
    assert (command.environment, command.model) == (environment, model)
    assert command.flags == flags


@pytest.mark.parametrize("text", ["docker run x", "sglang serve --tp 2"])
def test_what_starts_no_engine_or_names_no_model(text: str) -> None:
    with pytest.raises(ValueError, match=r"starts neither|names no model"):
        Command.parse(text)


def test_flags_are_dropped_with_their_values() -> None:
    command = Command.parse("vllm serve m --a 1 2 --b --c '{\"d\": 1}'")
    assert command.without(["--a"]).flags == ("--b", "--c", '{"d": 1}')
    assert command.without(["--b", "--c"]).flags == ("--a", "1", "2")
    with pytest.raises(ValueError, match="there is no"):
        command.without(["--e"])


def test_a_command_is_shown_as_a_shell_takes_it() -> None:
    text = "A=1 vllm serve m --a 'b c' --d"
    lines = Command.parse(text).lines()
    assert lines == ["A=1 vllm serve m \\", "--a 'b c' \\", "--d"]
    joined = " ".join(line.removesuffix("\\") for line in lines)
    assert shlex.split(joined) == shlex.split(text)


def test_recipes_are_well_formed() -> None:
    for recipe in RECIPES:
        assert recipe.engine in document.ENGINES
        assert recipe.shape in SHAPES, recipe.id
        for other, shape in recipe.beside.items():
            assert any(other in word for word in recipe.published.flags), recipe.id
            assert shape in SHAPES, recipe.id
        first = recipe.published.launcher[0]
        assert (first == "vllm") == (recipe.engine == "vllm"), recipe.id
        assert set(recipe.renamed) <= set(recipe.published.flags), recipe.id
        assert recipe.changed is None or recipe.changed != recipe.command
        if recipe.layers_on_gpu is not None:
            results = ROOT / "benchmarks" / "results"
            assert (results / recipe.layers_on_gpu).exists()


def test_every_recipe_has_an_outcome_and_the_page_is_made_of_them() -> None:
    for engine in document.ENGINES:
        ids = [r.id for r in RECIPES if r.engine == engine]
        assert list(RECORDED[engine]["outcomes"]) == ids
    assert PAGE.read_text() == document.page(RECIPES, RECORDED)


@pytest.mark.parametrize("engine", document.ENGINES)
def test_outcomes_are_of_the_version_that_is_tested(engine: str) -> None:
    rows = tomllib.loads((ROOT / "ci" / "matrix.toml").read_text())["row"]
    newest = next(r for r in rows if r["engine"] == engine and r["tested"] == "ci")
    assert RECORDED[engine]["version"] == newest["version"]


def test_a_change_is_told_with_what_it_drops_and_adds() -> None:
    entry = tomllib.loads("""
        id = "x"
        family = "X"
        engine = "sglang"
        shape = "y"
        gpus = 1
        source = "z"
        command = "sglang serve --model-path m --a 1 --b 2 3 --c"
        instead = { drop = ["--a", "--b"], add = ["--a", "4"], environment = ["E=5"] }
    """)
    recipe = book._recipe(entry, {"sglang": {}})
    assert document._changes(recipe) == (
        "without `--a 1`, `--b 2 3`, and with `E=5`, `--a 4`"
    )
    assert recipe.changed is not None
    assert recipe.changed.environment == ("E=5",)
    assert recipe.changed.flags == ("--c", "--enable-hybrid-plugin", "--a", "4")


def test_what_is_not_served_says_why_and_the_way_out() -> None:
    for entry in RECORDED.values():
        for name, outcome in entry["outcomes"].items():
            published = outcome["published"]
            if published["outcome"] == trial.SERVED:
                assert published["page_size"] > 0, name
            else:
                assert published["words"], name
                way_out = "drop --", "HYBRID_PLUGIN=0"
                told = any(words in published["words"] for words in way_out)
                assert told or "changed" in outcome, name


@pytest.mark.parametrize(
    ("outlook", "outcome"),
    [
        (Outlook(Prospect.SERVED, layout=LAYOUT, sizes=PoolSizes(9, 9)), "served"),
        (Outlook(Prospect.SERVED, note="it could not be built"), "not planned"),
        (Outlook(Prospect.SERVED, layout=LAYOUT, note="one pool"), "not planned"),
        (Outlook(Prospect.REFUSED, "no. /tmp/x/model"), "refused"),
        (Outlook(Prospect.LEFT_ALONE, "no"), "left alone"),
        (Outlook(Prospect.FAILS, "no"), "fails"),
    ],
)
def test_only_what_was_planned_counts_as_served(
    outlook: Outlook, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def foresee(model: str, flags: list[str], cache_bytes: int) -> Outlook:
        asked.append((json.loads(Path(model, "config.json").read_text()), flags))
        return outlook

    module = SimpleNamespace(foresee=foresee)
    monkeypatch.setattr(trial.importlib, "import_module", lambda _: module)
    recipe = next(r for r in RECIPES if r.changed is not None)
    found = trial._outcome(recipe)
    assert found.published.outcome == outcome
    assert asked[0] == (SHAPES[recipe.shape], list(recipe.command.flags))
    assert (found.changed is None) == (outcome == "served")
    assert "/tmp" not in found.published.words
    text = document.summary("vllm", "1.0", {recipe.id: found.as_json()})
    served = int(outcome == "served")
    assert text.startswith(f"vLLM 1.0: served: {served} of 1")
    assert ("not planned" in text) == (outcome == "not planned")
