# SPDX-License-Identifier: Apache-2.0
"""The benchmark of bundles runs, and measures what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bundle_folder
from hybrid_plugin.tiers.convert import Conversion, conversion


def test_writes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--repeats", "1", "--bundles", "25", "--length", "400"]
    argv = ["bundle_folder", "--small", *sizes, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    bundle_folder.main()
    result = json.loads((tmp_path / "bundle-folder.json").read_text())
    (row,) = result["models"]
    assert set(row["seconds"]) >= {"store", "load", "load, cold", "load and convert"}
    assert all(seconds > 0 for seconds in row["seconds"].values())
    assert "start with 25 bundles" in (tmp_path / "bundle-folder.md").read_text()


@pytest.mark.parametrize("model", bundle_folder.MODELS, ids=lambda m: m.name)
def test_layouts_are_those_of_the_models(model: bundle_folder.Model) -> None:
    own, other = bundle_folder.vllm_layouts(model), bundle_folder.sglang_layouts(model)
    assert own.state is not None and other.state is not None
    for source, target in (
        (own.pages["kv"], other.pages["kv"]),
        (own.state, other.state),
    ):
        assert source.row_bytes == target.row_bytes
        made = conversion(source, target)
        assert isinstance(made, Conversion) and not made.is_copy
