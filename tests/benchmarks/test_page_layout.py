# SPDX-License-Identifier: Apache-2.0
"""The benchmark of layouts compares equal caches, and says what it could not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import page_layout
from benchmarks.page_layout import SMALL_LOADS, SMALL_SHAPES
from benchmarks.page_layout_cache import Batch, Cache
from benchmarks.page_layout_kernels import Call

CPU = torch.device("cpu")


def test_each_kernel_is_measured_or_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(batch: Batch, cache: Cache) -> Call:
        raise ImportError("No module named 'engine'")

    monkeypatch.setattr(page_layout, "KERNELS", {"an engine's": (missing, True)})
    limits = ("--repeats", "2", "--seconds", "1e9")
    page_layout.main(["--out", str(tmp_path), "--device", "cpu", *limits])
    found = json.loads((tmp_path / "page-layout.json").read_text())
    rows, skipped = found["rows"], found["skipped"]
    cases = len(SMALL_SHAPES) * len(SMALL_LOADS)
    assert {row["kernel"] for row in rows} == {"PyTorch attention", "PyTorch KV write"}
    assert len(rows) == 2 * cases and len(skipped) == cases
    assert all(row["apart_us"] > 0 and row["packed_us"] > 0 for row in rows)
    assert {row["largest_difference"] for row in rows} == {0.0}
    written = (tmp_path / "page-layout.md").read_text()
    assert written.count("\n|") == 2 + len(rows)
    assert all(entry["reason"] in written for entry in skipped)


@pytest.mark.parametrize("by_page", [True, False])
def test_both_layouts_hold_the_same_in_every_layer(by_page: bool) -> None:
    batch = Batch(SMALL_SHAPES[0], SMALL_LOADS[0], CPU, torch.float32)
    apart, packed = (
        Cache(batch, packed=kind, by_page=by_page) for kind in (False, True)
    )
    for layer in range(batch.shape.layers):
        for one, other in zip(apart.layer(layer), packed.layer(layer), strict=True):
            assert torch.equal(one, other) and one.stride(0) != other.stride(0)
    assert apart.bytes == packed.bytes


def test_tokens_of_a_batch_lie_in_pages_of_their_own() -> None:
    batch = Batch(SMALL_SHAPES[0], SMALL_LOADS[0], CPU, torch.float32)
    load, size = batch.load, batch.shape.page_size
    assert len(batch.tokens.unique()) == load.sequences * load.context
    assert int(batch.tokens.min()) >= size, "page 0 takes the writes of padding"
    assert torch.equal(batch.fresh, batch.tokens[:, -load.new :].reshape(-1))


def test_a_layout_that_is_read_wrongly_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(SMALL_SHAPES[0], SMALL_LOADS[0], CPU, torch.float32)
    layer = Cache.layer

    def shifted(cache: Cache, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = layer(cache, number)
        return (keys.roll(1, 0), values) if keys.stride(0) > 128 else (keys, values)

    monkeypatch.setattr(Cache, "layer", shifted)
    assert page_layout.measure("PyTorch attention", batch, 1).largest_difference > 0
