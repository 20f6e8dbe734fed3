# SPDX-License-Identifier: Apache-2.0
"""Tensors of a row pool: of their shapes, in their rows, and on nobody else's bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_plugin.device.row_pool import (
    RowTensor,
    apart_bytes,
    place,
    together_bytes,
)

TENSORS = st.lists(
    st.builds(
        RowTensor,
        st.integers(1, 3),
        st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
        st.sampled_from((torch.float32, torch.bfloat16, torch.int8)),
        st.booleans(),
    ),
    max_size=4,
)


@settings(deadline=None)
@given(TENSORS, st.integers(1, 4), st.integers(0, 2))
def test_tensors_share_no_byte_and_keep_to_their_rows(
    tensors: list[RowTensor], fours: int, padding: int
) -> None:
    rows = 4 * fours  # of a byte at least, so that tensors start at whole elements
    stride = together_bytes(tensors) + 128 * padding
    size = rows * (sum(apart_bytes(tensors)) + stride)
    placed, parts = place(torch.zeros(size, dtype=torch.int8), rows, stride, tensors)
    for one, tensor in zip(tensors, placed, strict=True):
        assert tensor.shape == (one.layers, rows, *one.shape)
        assert tensor.dtype == one.dtype
        assert not one.apart or tensor.is_contiguous()
        tensor.fill_(1)
    ones = sum(tensor.numel() for tensor in placed)
    written = torch.cat([part.flatten() for part in parts]) if parts else torch.zeros(0)
    by_type = sum(int((t.view(torch.int8) != 0).sum()) for t in map(_flat, placed))
    assert int((written != 0).sum()) == by_type >= ones
    # A row of all parts is a row of all tensors.
    for part in parts:
        part[rows - 1].zero_()
    for tensor in placed:
        assert not tensor[:, rows - 1].any()
        assert bool((tensor[:, : rows - 1] == 1).all())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1)


def test_another_size_is_refused() -> None:
    tensors = [RowTensor(2, (3,), torch.int8)]
    with pytest.raises(ValueError, match="are not those of 4 rows"):
        place(torch.zeros(4 * 256 - 1, dtype=torch.int8), 4, 256, tensors)
    with pytest.raises(ValueError, match="are not those of 4 rows"):
        place(torch.zeros(4 * 128, dtype=torch.int8), 4, 128, tensors)
