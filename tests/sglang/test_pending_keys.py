# SPDX-License-Identifier: Apache-2.0
"""Prefills may begin between the tokens of a compressed key, by SGLang's own plan."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.attention.qsa.metadata import (
    QSAIndexerMetadata,
    build_pending_ring_slots,
    build_rope_position_matrix,
)
from sglang.srt.layers.attention.qsa.qsa_indexer import QSAIndexer
from sglang.srt.layers.attention.qwen_sparse_attn_backend import (
    QwenSparseAttnBackend,
    QwenSparseAttnMetadata,
)

from hybrid_plugin.sglang import pending_keys
from hybrid_plugin.sglang.pending_keys import PendingKeys
from tests.sglang.test_known_pools import compressed_pool, states

SIZE, WIDTH, LAYER, LENGTH = 4, 8, 3, 23
ROWS = torch.tensor([3, 1])
"""Of two sequences in `req_to_token`."""
SLOTS = torch.tensor([0, 5, 0, 2])
"""By rows; 0 is padding."""
PAGES = torch.stack([torch.arange(16, 48), torch.arange(48, 80)])
"""Positions of their tokens in the pool."""
BACKEND = SimpleNamespace(_qsa_write_plan=QwenSparseAttnBackend._qsa_write_plan)
INDEXER: Any = SimpleNamespace(
    layer_id=LAYER,
    compress_ratio=SIZE,
    normalize_compressed_keys=lambda keys, places: keys + places.view(-1, 1, 1) / 64,
    _use_fused_compress=lambda pool: False,
    _rope_from_matrix=lambda places: places[:, 0],
)
"""SGLang's, without norm and rotation; where a key begins is seen in it."""


class Pools:
    """Rings that belong to slots, and two sequences of random index keys."""

    def __init__(self) -> None:
        slots = states()
        self.pool = compressed_pool(slots)
        self.pending = PendingKeys()
        self.pending.give_to_slots(self.pool, slots)
        self.pending.slots = SLOTS.__getitem__
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(2, LENGTH, 1, WIDTH, generator=generator).bfloat16()

    def prefill(self, starts: list[int], ends: list[int], *, forget: int = -1) -> None:
        """A pass of both; the ring of slot `forget` is lost before it."""
        if forget >= 0:
            self.pool.qsa_key_state_buffer_pool[1].view(7, SIZE, WIDTH)[forget] = 0
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        mine = [torch.arange(a, b) for a, b in zip(starts, ends, strict=True)]
        positions = torch.cat(mine)
        batch = SimpleNamespace(
            extend_seq_lens_cpu=counts, extend_prefix_lens_cpu=starts
        )
        metadata = self.pending.planned(self._described(positions, counts, ends), batch)
        tokens = torch.cat([k[one] for k, one in zip(self.keys, mine, strict=True)])
        # Other tests of this process have the plugin's hooks put around it, for good.
        compress = inspect.unwrap(QSAIndexer.update_key_state_and_compress)
        pending_keys.compress(
            compress,
            INDEXER,
            tokens,
            positions,
            positions,
            metadata.indexer_metadata,
            metadata.indexer_metadata.pending_ring_slots,
        )

    def _described(self, positions: Any, counts: list[int], ends: list[int]) -> Any:
        lengths, extended = torch.tensor(ends), torch.tensor(counts)
        row = torch.repeat_interleave(torch.arange(2), extended)
        locs, groups, rows, members = self.pending.write_plan(
            BACKEND, lengths, extended, PAGES, len(positions)
        )
        indexer = QSAIndexerMetadata(
            sequence_lengths=lengths,
            token_to_batch_idx=row,
            token_slot_table=PAGES,
            out_cache_loc=positions,
            token_to_kv_pool=self.pool,
            compress_ratio=SIZE,
            block_topk=4,
            req_pool_indices=ROWS,
            write_locs=locs,
            compress_group_positions=groups,
            compress_sequence_ids=rows,
            compress_member_rows=members,
            pending_ring_slots=build_pending_ring_slots(
                token_to_batch_idx=row,
                req_pool_indices=ROWS,
                sequence_lengths=lengths,
                logical_positions=positions,
                compress_ratio=SIZE,
                is_extend=True,
            ),
            extend_rope_matrix=build_rope_position_matrix(positions, len(positions)),
        )
        return QwenSparseAttnMetadata(
            sequence_lengths=lengths,
            token_to_batch_idx=row,
            token_slot_table=PAGES,
            indexer_metadata=indexer,
        )

    def found(self) -> torch.Tensor:
        """The compressed keys of both."""
        kept = self.pool.get_qsa_compressed_k_buffer(LAYER)
        return kept[PAGES[:, : LENGTH // SIZE * SIZE : SIZE] // SIZE][:, :, 0].float()

    def expected(self) -> torch.Tensor:
        """Means, and where each begins."""
        count = LENGTH // SIZE
        keys = self.keys[:, : count * SIZE].float().view(2, count, SIZE, WIDTH)
        begins = torch.arange(count)[:, None] * SIZE / 64
        return keys.mean(2).bfloat16().float() + begins


@pytest.mark.parametrize(
    "cuts",
    [[], [(8, 4)], [(1, 0)], [(6, 8)], [(3, 5), (5, 6), (6, 7)], [(7, 1), (9, 22)]],
    ids=str,
)
def test_prefills_cut_anywhere_make_the_same_keys(cuts: list[tuple[int, int]]) -> None:
    pools, whole = Pools(), Pools()
    whole.prefill([0, 0], [LENGTH, LENGTH])
    starts = [0, 0]
    for cut in [*map(list, cuts), [LENGTH, LENGTH]]:
        pools.prefill(starts, cut)
        starts = cut
    assert torch.equal(pools.found(), whole.found())
    torch.testing.assert_close(whole.found(), whole.expected(), atol=2**-6, rtol=2**-7)


def test_a_lost_ring_makes_another_key() -> None:
    """Of its own sequence alone, and of the one key whose tokens were in it."""
    pools, whole = Pools(), Pools()
    whole.prefill([0, 0], [LENGTH, LENGTH])
    pools.prefill([0, 0], [6, 6])
    pools.prefill([6, 6], [LENGTH, LENGTH], forget=5)
    differ = (pools.found() != whole.found()).any(2)
    assert differ.tolist() == [[False] * 5, [False, True, False, False, False]]


def test_a_graph_that_is_replayed_finds_the_rings_of_slots() -> None:
    pools = Pools()
    rings = torch.tensor([3 * SIZE + 2, 1 * SIZE, 1])
    groups = torch.tensor([[12, 13, 14, 15]], dtype=torch.int32)
    graph = SimpleNamespace(pending_ring_slots=rings, graph_ring_group_locs=groups)
    pools.pending.replayed(graph)
    assert rings.tolist() == [2 * SIZE + 2, 5 * SIZE, 1]
    assert groups.tolist() == [[8, 9, 10, 11]]


def test_other_pools_keep_what_they_have() -> None:
    pending, described = PendingKeys(), object()
    assert pending.give_to_slots(SimpleNamespace(), None) == []
    assert pending.planned(described, None) is described
