# SPDX-License-Identifier: Apache-2.0
"""The container files copy what is there, over images of engines that are served."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest

import hybrid_plugin

ROOT = Path(hybrid_plugin.__file__).parents[1]
FILES = sorted((ROOT / "containers").glob("*.Containerfile"))
IMAGES = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}


def named(file: Path) -> str:
    """The engine of a container file."""
    return file.name.partition(".")[0]


def test_each_engine_has_one() -> None:
    assert {named(file) for file in FILES} == set(IMAGES)


@pytest.mark.parametrize("file", FILES, ids=named)
def test_the_image_is_of_a_version_that_is_served(file: Path) -> None:
    matrix = tomllib.loads((ROOT / "hybrid_plugin/upstream/matrix.toml").read_text())
    served = {
        row["version"]
        for row in matrix["row"]
        if row["engine"] == named(file) and row["status"] == "served"
    }
    text = file.read_text()
    found = re.search(r"^ARG (\w+)=(\S+)\nFROM (\S+):v\$\{(\w+)\}$", text, re.M)
    assert found is not None
    argument, version, image, used = found.groups()
    assert argument == used
    assert version in served
    assert image == IMAGES[named(file)]


@pytest.mark.parametrize("file", FILES, ids=named)
def test_what_is_copied_is_there_and_all_that_a_build_needs(file: Path) -> None:
    copied = [
        source
        for line in file.read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    where = project["tool"]["setuptools"]["packages"]["find"]["where"]
    needed = {"pyproject.toml", project["project"]["readme"], "LICENSE"}
    needed |= {"hybrid_plugin" if folder == "." else folder for folder in where}
    assert set(copied) == needed
    assert all((ROOT / source).exists() for source in copied)
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    for source in copied:
        assert any(fnmatch.fnmatch(f"!{source}", line) for line in kept)
