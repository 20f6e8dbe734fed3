# SPDX-License-Identifier: Apache-2.0
"""Rings of tokens that no index key stands for yet; imports nothing of SGLang's.

SGLang gives a ring to the row of each running request.  What is in it is part of what a
sequence must have to go on, exactly as its states are; so here the rings are given to
the slots instead, and whatever moves a slot moves its ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hybrid_plugin.device.rows import rows_of


class Rings:
    """The rings of pools, given to slots.

    `slots` says which slot the request of a row has; None until pools are given.
    """

    def __init__(self) -> None:
        self.slots: Callable[[torch.Tensor], torch.Tensor] | None = None

    def give_to_slots(self, kv_pool: Any, states: Any) -> list[torch.Tensor]:
        """Replace the rings of a pool by as many as there are slots.

        Args:
            kv_pool: SGLang's `DSATokenToKVPool`; others have no rings.
            states: its `HybridReqToTokenPool`.

        Returns:
            The rings as rows, `[slots, bytes]` int8, two for each layer with index
            keys; empty without rings.
        """
        if not getattr(kv_pool, "kpool_use_compress", False):
            return []
        count = len(states.mamba_pool.mamba_cache.temporal[0])
        keys = [_resized(ring, count) for ring in kv_pool._compress_tail_k]
        scores = [_resized(ring, count) for ring in kv_pool._compress_tail_score]
        kv_pool._compress_tail_k, kv_pool._compress_tail_score = keys, scores
        self.slots = states.get_mamba_indices
        return [rows_of(ring) for ring in (*keys, *scores) if len(ring)]

    def in_rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Where the rings of requests are.

        Args:
            indices: rows of requests, of any shape; 0 is padding, with the slot of
                padding, and so is what is negative.

        Returns:
            The same without rings; else their slots, of the same type.
        """
        if self.slots is None:
            return indices
        return self.slots(indices.clamp(min=0)).to(indices.dtype)

    def planned(self, metadata: Any) -> Any:
        """What describes a prefill, with slots for the rows of its index keys.

        Args:
            metadata: SGLang's `DSAMetadata`, perhaps with a `KPoolExtendPlan`.
        """
        plan = metadata.kpool_extend_plan
        if plan is None or self.slots is None:
            return metadata
        writes = replace(plan.writes, req=self.in_rows(plan.writes.req))
        tails = replace(plan.tails, req=self.in_rows(plan.tails.req))
        plan = replace(plan, writes=writes, tails=tails)
        return replace(metadata, kpool_extend_plan=plan)


def ring_tensors(kv_pool: Any) -> list[torch.Tensor]:
    """The rings of a pool, as they are.

    Args:
        kv_pool: of attention layers.
    """
    if not getattr(kv_pool, "kpool_use_compress", False):
        return []
    rings = (*kv_pool._compress_tail_k, *kv_pool._compress_tail_score)
    return [ring for ring in rings if len(ring)]


def _resized(ring: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros for `count` rows, or none where there were none."""
    rows = count if len(ring) else 0
    return ring.new_zeros((rows, *ring.shape[1:]))
