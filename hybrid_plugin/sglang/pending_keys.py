# SPDX-License-Identifier: Apache-2.0
"""Index keys that wait for others, and prefills that begin between them (Qwen4-Exp).

SGLang gives a ring of index keys, and their coordinates, to the row of each running
request.  A sequence cannot go on without it, so here the rings are given to the slots,
and whatever moves a slot moves its ring.  SGLang's own cache resumes at ends of pages,
where no key waits, and its prefills make compressed keys of their own tokens alone.
Turns end anywhere; so what waits in the ring is put in front of a prefill's own keys.
`N` tokens of a pass, `size` tokens of a compressed key, `D` channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from sglang.srt.layers.attention.qsa.metadata import QSAIndexerMetadata

from hybrid_plugin.device.arena import to_device
from hybrid_plugin.device.rows import rows_of

_IN_SLOTS = ("pending_ring_slots", "compress_group_ring_locs")


@dataclass(frozen=True)
class Waiting:
    """What waits for a prefill of which some sequence begins between keys."""

    keys: Sequence[torch.Tensor]
    """Of each layer, `[sequences * size, 1, D]`."""
    coordinates: torch.Tensor
    """`[sequences * size, 3]` int64."""
    order: torch.Tensor
    """int64, places in the pass's `N` tokens and the above behind them: each
    sequence's waiting tokens in front of its own."""

    def joined(self, own: torch.Tensor, waiting: torch.Tensor) -> torch.Tensor:
        """What a pass has of its tokens, and of those that wait, sequence by sequence.

        Args:
            own: `[N, ...]`.
            waiting: `[sequences * size, ...]`.
        """
        return torch.cat([own, waiting.to(own.dtype)])[self.order]


class Metadata(QSAIndexerMetadata, frozen=True):  # type: ignore[call-arg]
    """SGLang's, with what waits for the pass."""

    waiting: Waiting | None = None


class PendingKeys:
    """The rings of a pool, given to slots.

    `slots` says which slot the request of a row has; None until a pool is given.
    """

    def __init__(self) -> None:
        self.slots: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._size = 1

    def give_to_slots(self, kv_pool: Any, states: Any) -> list[torch.Tensor]:
        """Replace the rings of a pool by as many as there are slots.

        Args:
            kv_pool: SGLang's `QSATokenToKVPool`; others have no such rings.
            states: its `HybridReqToTokenPool`.

        Returns:
            The rings as rows, `[slots, bytes]` int8: of each layer, and coordinates;
            empty without rings.
        """
        if not pending_tensors(kv_pool):
            return []
        count = len(states.mamba_pool.mamba_cache.temporal[0])
        self._size = kv_pool.qsa_compress_ratio
        *keys, places = (
            one.new_zeros((count * self._size, *one.shape[1:]))
            for one in pending_tensors(kv_pool)
        )
        kv_pool.qsa_key_state_buffer_pool = keys
        kv_pool.qsa_rope_position_buffer = places
        kv_pool.qsa_num_request_slots = count
        self.slots = states.get_mamba_indices
        return [
            rows_of(one.view(count, self._size, *one.shape[1:]))
            for one in (*keys, places)
        ]

    def in_slots(self, places: torch.Tensor) -> torch.Tensor:
        """Where places in the rings of rows are in those of slots.

        Args:
            places: `row * size + number`, of any shape; row 0 is padding, with the
                slot of padding.
        """
        assert self.slots is not None
        found = self.slots(places.long() // self._size).long() * self._size
        return (found + places % self._size).to(places.dtype)

    def write_plan(
        self,
        backend: Any,
        lengths: torch.Tensor,
        extended: torch.Tensor,
        token_slot_table: torch.Tensor,
        tokens: int,
    ) -> Any:
        """Which compressed keys a prefill makes, and of which tokens.

        SGLang's plan, counting the tokens that wait as the pass's own.

        Args:
            backend: SGLang's `QwenSparseAttnBackend`.
            lengths: `[sequences]`, after the pass.
            extended: `[sequences]`, tokens of the pass.
            token_slot_table: `[sequences, tokens]`, positions in the pool.
            tokens: `N`.
        """
        lengths, size = lengths.long(), self._size
        before = (lengths - extended.long()[: len(lengths)]).clamp(min=0)
        begin = before // size * size
        counts = lengths - begin
        return backend._qsa_write_plan(
            token_slot_table=token_slot_table,
            start_blocks=before // size,
            end_blocks=lengths // size,
            capacity=tokens // size + len(lengths),
            compress_ratio=size,
            row_token_starts=counts.cumsum(0) - counts,
            prefix_lens=begin,
        )

    def planned(self, metadata: Any, batch: Any) -> Any:
        """What describes a pass, with slots for rows, and with what waits for it.

        Args:
            metadata: SGLang's `QwenSparseAttnMetadata`.
            batch: its `ForwardBatch`.
        """
        if self.slots is None:
            return metadata
        indexer = metadata.indexer_metadata
        moved = {
            name: self.in_slots(places)
            for name in _IN_SLOTS
            if (places := getattr(indexer, name)) is not None
        }
        indexer = msgspec.structs.replace(indexer, **moved)
        if indexer.compress_member_rows is not None:
            indexer = self._with_waiting(indexer, batch)
        return msgspec.structs.replace(metadata, indexer_metadata=indexer)

    def replayed(self, indexer: Any) -> None:
        """Have a graph that is replayed find the rings of slots.

        Args:
            indexer: SGLang's `QSAIndexerMetadata` of the graph, with rows written anew.
        """
        if self.slots is None:
            return
        for places in (indexer.pending_ring_slots, indexer.graph_ring_group_locs):
            if places is not None:
                places.copy_(self.in_slots(places))

    def _with_waiting(self, indexer: Any, batch: Any) -> Any:
        """The same with what waits, if a sequence begins between keys."""
        assert self.slots is not None
        counts = [int(count) for count in batch.extend_seq_lens_cpu]
        waits = [int(begin) % self._size for begin in batch.extend_prefix_lens_cpu]
        if not any(waits):
            return indexer
        pool = indexer.token_to_kv_pool
        slots = self.slots(indexer.req_pool_indices.long()).long()
        numbers = torch.arange(self._size, device=slots.device)
        places = (slots[:, None] * self._size + numbers).flatten()
        waiting = Waiting(
            keys=[ring[places] for ring in pool.qsa_key_state_buffer_pool],
            coordinates=pool.qsa_rope_position_buffer[places],
            order=to_device(order(counts, waits, self._size), slots.device),
        )
        fields = msgspec.structs.asdict(indexer)
        own = fields.pop("extend_rope_matrix")
        joined = waiting.joined(own, waiting.coordinates)
        return Metadata(**fields, extend_rope_matrix=joined, waiting=waiting)


def compress(
    original: Callable[..., None],
    indexer: Any,
    token_k: torch.Tensor,
    logical_positions: torch.Tensor,
    rope_positions: torch.Tensor,
    metadata: Any,
    state_slots: torch.Tensor | None = None,
    state_stored: bool = False,
) -> None:
    """Keep what waits from now on, and compress what is complete.

    Args:
        original: SGLang's `QSAIndexer.update_key_state_and_compress`.
        indexer: of a layer.
        token_k: `[N, 1, D]` index keys.
        logical_positions: `[N]`.
        rope_positions: `[N]` or `[3, N]`.
        metadata: of the pass.
        state_slots: `[N]`, places in the rings.
        state_stored: whether they are kept already.
    """
    given = (logical_positions, rope_positions, metadata)
    waiting: Waiting | None = getattr(metadata, "waiting", None)
    if waiting is None:
        original(indexer, token_k, *given, state_slots, state_stored)
        return
    pool = metadata.token_to_kv_pool
    if not state_stored:
        assert state_slots is not None, "a pass has planned them"
        pool.set_qsa_key_state_buffer(indexer.layer_id, state_slots, token_k)
        pool.set_qsa_rope_position_buffer(state_slots, rope_positions)
    before = waiting.keys[pool._transfer_full_attention_id(indexer.layer_id)]
    original(indexer, waiting.joined(token_k, before), *given, state_slots, True)


def order(counts: Sequence[int], waits: Sequence[int], size: int) -> torch.Tensor:
    """Places that put the waiting tokens of each sequence in front of its own.

    Args:
        counts: own tokens of each sequence.
        waits: those that wait.
        size: places for those that wait, of each sequence, behind all own ones.

    Returns:
        int64, on the host.
    """
    parts, start, behind = [], 0, sum(counts)
    for count, wait in zip(counts, waits, strict=True):
        parts += [np.arange(behind, behind + wait), np.arange(start, start + count)]
        start, behind = start + count, behind + size
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def pending_tensors(kv_pool: Any) -> list[torch.Tensor]:
    """The rings of a pool, as they are: of each layer, and coordinates.

    Args:
        kv_pool: of attention layers.
    """
    keys = getattr(kv_pool, "qsa_key_state_buffer_pool", ())
    return [*keys, kv_pool.qsa_rope_position_buffer] if keys else []
