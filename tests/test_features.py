# SPDX-License-Identifier: Apache-2.0
"""The table of features: its tests exist, and its refusals are in the code.

`tests/engines/test_activation.py` has engines say those that flags ask for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ci.features import PAGE, ROOT, Standing, features, page

STANDINGS = [
    pytest.param(standing, id=f"{feature.name}, {engine}")
    for feature in features()
    for engine, standing in feature.standings.items()
]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(features()), "python -m ci.features --write"


@cache
def texts(path: Path) -> str:
    """All texts of a file, each on a line."""
    tree = ast.parse(path.read_text())
    return "\n".join(filter(None, map(_text, ast.walk(tree))))


def _text(node: ast.AST) -> str | None:
    """A text, with what is not fixed in it left out."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_part, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "{}"


def sources() -> Iterator[Path]:
    for engine in ("vllm", "sglang"):
        yield from (ROOT / "hybrid_plugin" / engine).rglob("*.py")


def is_said(sentence: str) -> bool:
    """Whether an adapter has the sentence, or one with names left out."""
    return any(
        sentence in line or is_made_of(sentence, line)
        for path in sources()
        for line in texts(path).splitlines()
    )


def is_made_of(sentence: str, line: str) -> bool:
    """Whether a line becomes the sentence once names are where it has `{}`."""
    if len(line.replace("{}", "")) < len(sentence) // 2:
        return False
    pattern = r"\w+".join(map(re.escape, line.split("{}")))
    return re.fullmatch(pattern, sentence) is not None


def test_names_are_filled_in_and_nothing_else() -> None:
    sentence = "Model keeps caches, which is not supported."
    assert is_made_of(sentence, "{} keeps caches, which is not supported.")
    assert not is_made_of(sentence, "{} keeps pages, which is not supported.")
    assert not is_made_of("Two words.", "{}.") and not is_made_of("Word.", "{}.")


@pytest.mark.parametrize("standing", STANDINGS)
def test_what_is_named_is_there(standing: Standing) -> None:
    for named in filter(None, (*standing.tested, standing.by)):
        path, function = named.split("::")
        defined = ast.walk(ast.parse((ROOT / path).read_text()))
        names = {node.name for node in defined if isinstance(node, ast.FunctionDef)}
        assert function in names, named
        if standing.tested:
            assert path.startswith("tests/engines/"), named
    if standing.refused:
        assert is_said(standing.refused)
    if standing.by:
        assert standing.refused in texts(ROOT / standing.by.split("::")[0])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tested": ("a::b",), "untested": "c"},
        {"refused": "no."},
        {"tested": ("a::b",), "by": "c::d"},
        {"refused": "no.", "flags": ("--x",), "by": "c::d"},
    ],
)
def test_a_row_says_one_thing(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not one standing|for refusals"):
        Standing(**given)  # type: ignore[arg-type]
