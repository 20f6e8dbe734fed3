# SPDX-License-Identifier: Apache-2.0
"""What the documentation says that the code knows better."""

from __future__ import annotations

from pathlib import Path

from hybrid_plugin.config import options_table

ROOT = Path(__file__).parents[1]


def test_readme_lists_the_options_as_they_are() -> None:
    assert options_table() in (ROOT / "README.md").read_text()


def test_every_source_file_names_its_licence() -> None:
    folders = ("hybrid_plugin", "kernels", "model_registry", "tests", "tools")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py")]
    files += (ROOT / "benchmarks").glob("*.py")
    assert files
    line = "# SPDX-License-Identifier: Apache-2.0"
    bare = [str(f) for f in files if not f.read_text().startswith(line)]
    assert bare == []
