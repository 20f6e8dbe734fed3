# SPDX-License-Identifier: Apache-2.0
"""The weights of a short convolution in front of a state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hybrid_models.kit import Kit
from hybrid_models.sharding import sharded


class Convolution(nn.Module):
    """``weight [channels, taps]`` and ``bias [channels]`` or None, of this rank.

    The mixer applies them.
    """

    def __init__(
        self,
        kit: Kit,
        channels: Sequence[int],
        taps: int,
        *,
        bias: bool,
        whole: Sequence[bool] = (),
    ) -> None:
        """Build it.

        Args:
            kit: of the model.
            channels: parts of the channels, each of which is cut among ranks; the
                checkpoint may have one tensor for all of them, or one for each.
            taps: of the convolution.
            bias: whether it has one.
            whole: for each part, whether every rank has all of it; no part by default.
        """
        super().__init__()
        self.weight = sharded(kit, channels, (taps,), whole=whole)
        self.bias = sharded(kit, channels, whole=whole) if bias else None
