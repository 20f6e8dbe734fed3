# SPDX-License-Identifier: Apache-2.0
"""Nothing that runs in an engine draws from a random generator, or sets one.

Sampling takes its noise from generators of the process that the engine seeds.  A draw
of ours would change answers, and a seed would repeat them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "hybrid_plugin" / "tools"
"""Programs of their own; `simulate` makes its requests with a generator of its own."""
FILES = sorted(
    file
    for folder in ("hybrid_plugin", "kernels")
    for file in (ROOT / folder).rglob("*.py")
    if TOOLS not in file.parents and "test" not in file.name
)
GLOBAL = {
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_random_seed"),
    *("get_rng_state", "set_rng_state", "fork_rng", "getstate", "setstate"),
    *("default_generator", "default_generators", "default_rng", "Generator"),
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like"),
    *("randperm", "normal", "normal_", "uniform_", "exponential_", "random_"),
    *("bernoulli", "bernoulli_", "multinomial", "shuffle"),
}


def uses(source: str) -> Iterator[str]:
    """Names in a module that draw from a generator or set one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            if node.attr in GLOBAL:
                yield node.attr
            continue
        else:
            continue
        yield from (n for n in names if "random" in n.split(".") or n == "secrets")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_module_uses_one(file: Path) -> None:
    assert list(uses(file.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "from numpy import random",
        "torch.manual_seed(0)",
        "torch.empty(3).exponential_()",
        "state = torch.get_rng_state()",
    ],
)
def test_uses_are_found(line: str) -> None:
    assert list(uses(line))
