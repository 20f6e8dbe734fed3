# SPDX-License-Identifier: Apache-2.0
"""What the documentation says that the code knows better."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_plugin.config import options_table

ROOT = Path(__file__).parents[1]
_PAGES = sorted((ROOT / "docs").glob("*.md"))
_FOLDERS = "(?:benchmarks|ci|docs|hybrid_plugin|kernels|model_registry|tests|tools)"


MOST_WORDS = 900
"""Of the README: who wants to know more follows its links."""


def test_options_are_listed_as_they_are() -> None:
    assert options_table() in (ROOT / "docs" / "options.md").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS


def test_every_source_file_names_its_licence() -> None:
    folders = ("hybrid_plugin", "kernels", "model_registry", "tests", "tools")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py")]
    files += (ROOT / "benchmarks").glob("*.py")
    assert files
    line = "# SPDX-License-Identifier: Apache-2.0"
    bare = [str(f) for f in files if not f.read_text().startswith(line)]
    assert bare == []


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in _PAGES)],
)
def test_files_that_are_named_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(rf"`({_FOLDERS}/[\w./-]+)`", text))
    named |= {
        str((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT))
        for link in re.findall(r"\]\(([\w./-]+)\)", text)
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
