# SPDX-License-Identifier: Apache-2.0
"""docs/recipes/index.md, from the recipes and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from recipes.book import Command, Recipe
from recipes.trial import SERVED, UNPLANNED

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
Outcomes = Mapping[str, Mapping[str, Any]]
"""By recipe: `Outcome.as_json()`."""

_HEAD = """\
# Recipes

Serving commands that others have published for hybrid models, with the plugin.
`make recipes` makes this page out of [recipes.toml](recipes.toml) and of what became of
each command; a test compares it.

"""

_WORDS = """
* **served**: the engine takes every flag as published, the plugin is active, and has
  planned its pools.  In vLLM the command is the published one; in SGLang
  `--enable-hybrid-plugin` is added.
* **with a change**: not as published, but served with the change that is named.
* **left alone**: the engine serves it without the plugin.
* **not served**: the plugin refuses it (in vLLM it steps aside, with a warning), or the
  engine does not take it; the sentence is theirs.

Where the supported version of an engine has another name for a flag, the recipe has
that name and says so.  Commands for other than NVIDIA GPUs are left out.

## How they are tested

Each command goes through the engine's own argument parser and configuration, the
plugin's activation, and its planning of pools, with a config.json that has the model's
layers but few of them (`ci/recipes/shapes.py`), in CI and without a GPU.  The engines
are told there that they run on the GPUs that a recipe names, so that attention
backends, quantised KV and ranks of tensor parallelism are what they would be.  All
that is pretended is in `ci/recipes/vllm_gpu.py` and `ci/recipes/sglang_gpu.py`.  A rank
has 32 GiB for its cache.

No weights are loaded and nothing is computed.  So this says that a command starts with
the plugin, and how its cache would be laid out.  It does not say that answers are
right, or fast, and covers nothing else that only a GPU shows: memory, kernels, graphs,
several ranks or machines at once.  **No GPU has run any of these commands with the
plugin.**  The column *GPU* says where layers of the same shape ran on one, with dummy
weights and other flags; [measurements](../measurements.md) has the rest.

Not listed are models for which no published command was found.
"""


def line(name: str, outcome: Mapping[str, Any]) -> str:
    """One recipe, for a terminal."""
    published, changed = outcome["published"], outcome.get("changed")
    text = f"{name}: {published['outcome']}"
    if published.get("words"):
        text += f": {published['words']}"
    return text + (f" / with a change: {changed['outcome']}" if changed else "")


def summary(engine: str, version: str, outcomes: Outcomes) -> str:
    """`served: N of M` of an engine, and what became of the rest."""
    return f"{ENGINES[engine]} {version}: {_counts(outcomes)}"


def _counts(outcomes: Outcomes) -> str:
    verdicts = [_verdict(outcome) for outcome in outcomes.values()]
    served = verdicts.count(SERVED)
    parts = [f"served: {served} of {len(verdicts)}"]
    for verdict in ("with a change", "left alone", "not served", UNPLANNED):
        if verdict in verdicts:
            parts.append(f"{verdicts.count(verdict)} {verdict}")
    return ", ".join(parts)


def page(recipes: Sequence[Recipe], found: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        recipes: all of them.
        found: by engine, its `version` and its `outcomes`.
    """
    everything = {k: v for e in found.values() for k, v in e["outcomes"].items()}
    lines = [_HEAD.rstrip(), "", f"**{_counts(everything)}.**", ""]
    for engine, entry in found.items():
        lines.append(f"* {summary(engine, entry['version'], entry['outcomes'])}")
    lines += ["", "| recipe | engine | GPUs | with the plugin | GPU |"]
    lines += ["|---|---|---|---|---|"]
    for recipe in recipes:
        lines.append(_row(recipe, everything[recipe.id]))
    lines.append(_WORDS.rstrip())
    for family in dict.fromkeys(recipe.family for recipe in recipes):
        lines += ["", f"## {family}"]
        for recipe in (r for r in recipes if r.family == family):
            lines += ["", *_section(recipe, everything[recipe.id])]
    return "\n".join(lines) + "\n"


def _verdict(outcome: Mapping[str, Any]) -> str:
    published, changed = outcome["published"], outcome.get("changed")
    if published["outcome"] == SERVED:
        return SERVED
    if changed is not None and changed["outcome"] == SERVED:
        return "with a change"
    if published["outcome"] in ("left alone", UNPLANNED):
        return str(published["outcome"])
    return "not served"


def _row(recipe: Recipe, outcome: Mapping[str, Any]) -> str:
    result = recipe.layers_on_gpu
    results = "../../benchmarks/results"
    ran = "no" if result is None else f"[layers]({results}/{result})"
    cells = (
        f"[{recipe.id}](#{_anchor(recipe.id)})",
        ENGINES[recipe.engine],
        f"{recipe.gpus} {recipe.gpu}",
        _verdict(outcome),
        ran,
    )
    return f"| {' | '.join(cells)} |"


def _anchor(name: str) -> str:
    """As the site's generator and code forges make them of headings."""
    return name.replace(".", "")


def _section(recipe: Recipe, outcome: Mapping[str, Any]) -> Iterator[str]:
    published, changed = outcome["published"], outcome.get("changed")
    yield f"### {recipe.id}"
    yield ""
    yield f"{ENGINES[recipe.engine]}.  Source: {recipe.source}."
    for old, new in recipe.renamed.items():
        yield f"`{old}` is called `{new}` in this version."
    if published["outcome"] == SERVED:
        yield f"**Served**, in pages of {published['page_size']} tokens:"
        yield from _block(recipe.command)
        return
    yield from _why_not(recipe, published)
    if recipe.changed and changed and changed["outcome"] == SERVED:
        pages = f"in pages of {changed['page_size']} tokens"
        yield f"**Served** {_changes(recipe)}, {pages}:"
        yield from _block(recipe.changed)
    else:
        yield "The command:"
        yield from _block(recipe.published)


def _why_not(recipe: Recipe, published: Mapping[str, Any]) -> Iterator[str]:
    words = published["words"]
    sentence = words if words.endswith(".") else f"{words}."
    who = {
        "refused": "The plugin says",
        "left alone": "The plugin leaves it alone",
        "fails": f"{ENGINES[recipe.engine]} itself does not take it",
        UNPLANNED: "It was not planned here",
    }[published["outcome"]]
    yield f"**Not served as published.**  {who}: {sentence}"


def _changes(recipe: Recipe) -> str:
    """How the command that is served differs from the published one."""
    dropped = [g for g in recipe.command.groups() if g[0] in recipe.drop]
    flags = Command((), (), "", recipe.add).groups()
    added = [*((item,) for item in recipe.environment), *flags]
    parts = [f"without {_quoted(dropped)}"] if dropped else []
    parts += [f"with {_quoted(added)}"] if added else []
    return ", and ".join(parts)


def _quoted(groups: Iterable[Sequence[str]]) -> str:
    return ", ".join(f"`{' '.join(group)}`" for group in groups)


def _block(command: Command) -> list[str]:
    first, *others = command.lines()
    return ["", f"    {first}", *(f"        {line}" for line in others)]
