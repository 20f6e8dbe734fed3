# SPDX-License-Identifier: Apache-2.0
"""The memory of a pool, seen as rows: one row, or several parts of one, per id."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Arena:
    """Bytes of one pool.

    A layer-major pool has one part per layer, a slot-major pool a single one;
    page or slot `i` is row `i` of every part.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """Take over the memory.

        Args:
            parts: `[ids, bytes]` int8 tensors with contiguous rows; ids and
                device must be equal.
        """
        shapes = {(part.dim(), part.shape[0], part.device) for part in parts}
        if len(shapes) != 1 or next(iter(shapes))[0] != 2:
            raise ValueError("the parts of an arena are matrices with equal row counts")
        self.parts = tuple(parts)

    @property
    def capacity(self) -> int:
        """Number of ids, the reserved one included."""
        return self.parts[0].shape[0]

    def __deepcopy__(self, memo: object) -> Arena:
        """Memory is never duplicated: engines copy configurations freely."""
        return self

    def zero(self, index: int) -> None:
        """Clear one id, in order on the current stream."""
        for part in self.parts:
            part[index].zero_()

    def copy(self, source: int, destination: int) -> None:
        """Copy one id over another, in order on the current stream."""
        for part in self.parts:
            part[destination].copy_(part[source])
