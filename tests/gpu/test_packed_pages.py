# SPDX-License-Identifier: Apache-2.0
"""The engines' attention and KV writes on packed pages of 9 GiB, the high ones too.

Pages have Falcon-H1's 44 layers side by side, so that offsets pass 2**32 elements.
Each kernel runs on scattered pages, and on a small cache with each layer apart that
holds the same; all that lies between is NaN.  Kernels are tested where they are
installed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from benchmarks.page_layout_cache import Batch, Cache, Load, Shape
from benchmarks.page_layout_kernels import KERNELS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")
SHAPE = Shape("Falcon-H1", layers=44, query_heads=12, kv_heads=2, width=128)
LOADS = (
    Load("decode", sequences=3, context=200, new=1),
    Load("prefill", sequences=2, context=300, new=70),
)
PAGE = (SHAPE.layers, SHAPE.page_size, SHAPE.kv_heads, 2 * SHAPE.width)
PAGES = 13_000
"""Page 5,958 begins at 2**31 elements, page 11,916 at 2**32."""
LAYERS = (0, 43)


@pytest.fixture(scope="module")
def memory() -> Iterator[torch.Tensor]:
    count = PAGES * torch.Size(PAGE).numel()
    assert count > 2**32
    yield torch.empty(count, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.empty_cache()


class Scattered(Cache):
    """Packed pages at `where`, with what a small cache holds in two of the layers."""

    def __init__(self, small: Cache, where: torch.Tensor, memory: torch.Tensor) -> None:
        self.by_page, self.where = small.by_page, where
        memory.fill_(torch.nan)
        size, heads, width = SHAPE.page_size, SHAPE.kv_heads, SHAPE.width
        tokens = memory.view(PAGES * size, SHAPE.layers, 2, heads, width)
        pages = memory.view(PAGES, *PAGE)
        self._layers = []
        for layer in range(SHAPE.layers):
            if self.by_page:
                part = pages[:, layer]
                self._layers.append((part[..., :width], part[..., width:]))
            else:
                self._layers.append((tokens[:, layer, 0], tokens[:, layer, 1]))
        for layer in LAYERS:
            both = zip(self.layer(layer), small.layer(layer), strict=True)
            for kept, values in both:
                kept[self.rows()] = values

    def rows(self) -> torch.Tensor:
        """Where the small cache's pages, or its tokens, are."""
        if self.by_page:
            return self.where
        within = torch.arange(SHAPE.page_size, device=DEVICE)
        return (self.where[:, None] * SHAPE.page_size + within).reshape(-1)


def scattered(batch: Batch, where: torch.Tensor) -> Batch:
    """The same step on other pages."""
    size, moved = SHAPE.page_size, copy.copy(batch)

    def places(tokens: torch.Tensor) -> torch.Tensor:
        return where[tokens // size] * size + tokens % size

    moved.table = where[batch.table.long()].to(torch.int32)
    moved.tokens, moved.fresh = places(batch.tokens), places(batch.fresh)
    return moved


@pytest.mark.parametrize("load", LOADS, ids=[load.name for load in LOADS])
@pytest.mark.parametrize("kernel", KERNELS)
def test_high_pages_are_treated_as_low_ones_are(
    kernel: str, load: Load, memory: torch.Tensor
) -> None:
    torch.manual_seed(3)
    batch = Batch(SHAPE, load, DEVICE, torch.bfloat16)
    make, by_page = KERNELS[kernel]
    small = Cache(batch, packed=False, by_page=by_page)
    low = torch.arange(1, batch.pages // 2, device=DEVICE)
    high = PAGES - 1 - torch.arange(batch.pages - len(low), device=DEVICE)
    where = torch.cat((low, high))
    large = Scattered(small, where, memory)
    try:
        expect = make(batch, small)
        expected = {layer: expect(layer).clone() for layer in LAYERS}
    except (ImportError, NotImplementedError) as error:
        pytest.skip(str(error))
    call = make(scattered(batch, where), large)
    for layer in LAYERS:
        found = call(layer)
        if found.shape != expected[layer].shape:  # a write returns the keys
            found = found[large.rows()]
        torch.testing.assert_close(found, expected[layer], rtol=1.6e-2, atol=1e-3)
        both = zip(large.layer(layer), small.layer(layer), strict=True)
        assert all(torch.equal(kept[large.rows()], own) for kept, own in both)
    for layer in set(range(SHAPE.layers)) - set(LAYERS):
        for kept in large.layer(layer):
            assert kept[large.rows()].isnan().all()
