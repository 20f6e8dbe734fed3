# SPDX-License-Identifier: Apache-2.0
"""Index keys of several tokens: made by prefills and steps, cut in any places."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_plugin.sglang_cpu import index_keys, sparse_latents

SIZE, WIDTH, PAGE, ROW, PAGES = 4, 128, 64, 2, 3
LENGTH = 23
ROUNDING = 2**-4
"""Of the largest channel of a key, in eight bits."""


@dataclass
class Pool:
    """What the kernels read of SGLang's."""

    index_kpool: int = SIZE
    index_head_dim: int = WIDTH
    index_page_size: int = PAGE


class Sequence:
    """One sequence whose tokens lie in page 1, and the keys made of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.keys = torch.randn(LENGTH, WIDTH, dtype=torch.bfloat16)
        self.scores = torch.randn(LENGTH, WIDTH, dtype=torch.bfloat16)
        self.ape = torch.randn(SIZE, WIDTH)
        self.buf = torch.zeros(PAGES, PAGE * (WIDTH + 4), dtype=torch.uint8)
        ring = torch.zeros(3, SIZE + 1, WIDTH, dtype=torch.bfloat16)
        self.ring = (ring, ring.clone())
        self.pieces = torch.arange(SIZE, 2 * SIZE)[None]

    def prefill(self, start: int, end: int) -> None:
        """As SGLang plans it: complete keys, and what is left over in the ring."""
        first, last = start // SIZE, end // SIZE
        numbers = torch.arange(first, last)
        waited = torch.where(numbers == first, start % SIZE, 0)
        chunk = self.keys[start:end], self.scores[start:end]
        index_keys.pool_and_write(
            Pool(),
            self.buf,
            *chunk,
            *self.ring,
            torch.full((len(numbers),), ROW),
            waited,
            (numbers * SIZE - start).clamp(min=0),
            numbers * SIZE,
            self.ape,
            index_keys.places_of(Pool(), self.pieces, numbers[None])[0],
        )
        left = max(last * SIZE, start)
        index_keys.leave_in_ring(
            Pool(),
            *chunk,
            *self.ring,
            *(torch.tensor([n]) for n in (ROW, left, left - start, end - left)),
        )

    def step(self, position: int) -> None:
        """One token more."""
        mine = slice(position, position + 1)
        index_keys.step(
            Pool(),
            self.buf,
            *self.ring,
            self.keys[mine],
            self.scores[mine],
            self.ape,
            self.pieces,
            torch.tensor([ROW]),
            torch.tensor([position]),
            torch.tensor([position + 1]),
            torch.tensor([PAGE * SIZE + position]),
        )

    def found(self) -> torch.Tensor:
        """The keys in the page."""
        numbers = torch.arange(LENGTH // SIZE)[None]
        places = index_keys.places_of(Pool(), self.pieces, numbers)[0]
        return index_keys.read(Pool(), self.buf, places)

    def expected(self) -> torch.Tensor:
        """A mean for each channel, by the softmax of its scores."""
        count = LENGTH // SIZE * SIZE
        keys = self.keys[:count].float().view(-1, SIZE, WIDTH)
        scores = self.scores[:count].float().view(-1, SIZE, WIDTH) + self.ape
        shares = scores.exp() / scores.exp().sum(1, keepdim=True)
        return (keys * shares).sum(1)


@pytest.mark.parametrize(
    "cuts", [(), (8,), (1,), (3, 5, 6), (7, 9, 18)], ids=lambda cuts: str(cuts)
)
def test_prefills_cut_anywhere_make_the_same_keys(cuts: tuple[int, ...]) -> None:
    sequence, whole = Sequence(), Sequence()
    whole.prefill(0, LENGTH)
    for start, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        sequence.prefill(start, end)
    assert torch.equal(sequence.buf, whole.buf)
    largest = whole.expected().abs().amax()
    torch.testing.assert_close(
        whole.found(), whole.expected(), atol=float(largest * ROUNDING), rtol=0
    )


@pytest.mark.parametrize("prompt", [1, 6, 8, 11])
def test_steps_go_on_where_a_prefill_ended(prompt: int) -> None:
    sequence, whole = Sequence(), Sequence()
    whole.prefill(0, LENGTH)
    sequence.prefill(0, prompt)
    for position in range(prompt, LENGTH):
        sequence.step(position)
    assert torch.equal(sequence.buf, whole.buf)


def test_a_lost_ring_makes_another_key() -> None:
    """What the ring is for."""
    sequence, whole = Sequence(), Sequence()
    whole.prefill(0, LENGTH)
    sequence.prefill(0, 6)
    for part in sequence.ring:
        part.zero_()
    sequence.prefill(6, LENGTH)
    differs = (sequence.found() != whole.found()).any(1)
    assert differs.tolist() == [False, True, False, False, False]


def test_padding_writes_nothing() -> None:
    sequence = Sequence()
    index_keys.step(
        Pool(),
        sequence.buf,
        *sequence.ring,
        sequence.keys[3:4],
        sequence.scores[3:4],
        sequence.ape,
        sequence.pieces,
        *(torch.tensor([n]) for n in (0, 3, 4, 0)),
    )
    assert not sequence.buf.any() and not any(part.any() for part in sequence.ring)


def test_a_query_reads_the_best_keys_and_what_has_none() -> None:
    """Keys 0 to 4 of four tokens each, of which a query reads two."""
    scores = torch.tensor([[1.0, 3, 2, 9, 9], [1.0, 3, 2, 9, 9]])
    positions = torch.tensor([13, 19])
    found = sparse_latents._best(scores, positions, SIZE, 2 * SIZE)
    assert found[0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, -1]
    assert sorted(found[1][: 2 * SIZE].tolist()) == list(range(12, 20))
    assert found[1][2 * SIZE :].tolist() == [-1, -1, -1]


def test_a_query_before_the_first_key_reads_its_tokens() -> None:
    found = sparse_latents._best(torch.zeros(1, 0), torch.tensor([2]), SIZE, 2 * SIZE)
    assert found[0].tolist() == [-1] * 8 + [0, 1, 2]


WIDTH_OF_STEP = 6
"""Tokens that a step verifies."""


class Verifying(Sequence):
    """The same sequence, whose tokens are drafted, rightly and wrongly."""

    def __init__(self, room: int = SIZE + WIDTH_OF_STEP) -> None:
        """Give the ring `room` for so many tokens."""
        super().__init__()
        ring = torch.zeros(3, room, WIDTH, dtype=torch.bfloat16)
        self.ring = (ring, ring.clone())

    def verify(self, start: int, right: int) -> None:
        """Verify a step's tokens from `start` on, of which the first few are right."""
        places = torch.arange(start, start + WIDTH_OF_STEP)
        known = places.clamp(max=LENGTH - 1)
        wrong = torch.arange(WIDTH_OF_STEP) >= right
        keys, scores = self.keys[known], self.scores[known]
        keys[wrong], scores[wrong] = -keys[wrong] - 1, scores[wrong] + 3
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: False),
            positions=places,
            seq_lens=torch.tensor([start]),
            req_pool_indices=torch.tensor([ROW]),
            out_cache_loc=PAGE * SIZE + places,
        )
        indexer = SimpleNamespace(index_kpool_compress_ape=self.ape, scale_fmt=None)
        plan = sparse_latents.Pass(self.pieces)
        sparse_latents._keep(indexer, self, plan, keys, scores, places, batch, layer=0)

    def kpool_decode_update_index_cache(self, layer_id: int, **given: Any) -> None:
        """As SGLang's pool does."""
        ring = dict(zip(("tail_k", "tail_score"), self.ring, strict=True))
        index_keys.step(Pool(), self.buf, **ring, **given)


def verified(prompt: int, accepted: list[int], **room: int) -> Verifying:
    """A prompt, and behind it steps that each accept so many drafts."""
    sequence = Verifying(**room)
    sequence.prefill(0, prompt)
    position = prompt
    for count in accepted:
        sequence.verify(position, 1 + count)
        position += 1 + count
    return sequence


@pytest.mark.parametrize("prompt", [1, 6, 8, 11])
@pytest.mark.parametrize(
    "accepted",
    [[0, 0, 0, 0, 0], [5, 5], [2, 0, 3, 1], [1, 1, 1, 1, 1]],
    ids=lambda accepted: str(accepted),
)
def test_rejected_drafts_leave_no_key_behind(prompt: int, accepted: list[int]) -> None:
    """Bit for bit: the keys of known tokens, and the ring of those without a key."""
    sequence, whole = verified(prompt, accepted), Sequence()
    end = min(prompt + sum(accepted) + len(accepted), LENGTH)
    whole.prefill(0, prompt)
    for position in range(prompt, end):
        whole.step(position)
    count = end // SIZE
    assert torch.equal(sequence.found()[:count], whole.found()[:count])
    for ours, other in zip(sequence.ring, whole.ring, strict=True):
        for position in range(count * SIZE, end):
            row = ours[ROW, position % ours.shape[1]]
            assert torch.equal(row, other[ROW, position % other.shape[1]])


def test_a_sequence_goes_on_from_a_copy_of_its_ring_behind_rejected_drafts() -> None:
    """What a hit does: the ring was copied when the turn ended, between two keys."""
    sequence, whole = verified(6, [2, 1]), Sequence()
    whole.prefill(0, LENGTH)
    copies = [ring[ROW].clone() for ring in sequence.ring]
    sequence.verify(11, 0)  # as the overlap schedule does, behind the end
    for ring, copy in zip(sequence.ring, copies, strict=True):
        ring[ROW] = copy
    sequence.prefill(11, LENGTH)
    assert torch.equal(sequence.buf, whole.buf)


def test_a_ring_without_room_for_drafts_loses_tokens() -> None:
    """What the room is for; SGLang takes as much."""
    whole = Sequence()
    whole.prefill(0, LENGTH)
    narrow = verified(7, [0] * 5, room=SIZE)
    differs = (narrow.found() != whole.found()).any(1)
    assert differs[:3].tolist() == [False, False, True]
    exact = verified(7, [0] * 5, room=SIZE - 1 + WIDTH_OF_STEP)
    assert torch.equal(exact.found()[:3], whole.found()[:3])


def test_trees_are_refused() -> None:
    mask = torch.ones(2, 3, 3, dtype=torch.bool).tril()
    lengths = torch.tensor([5, 9])

    def batch(mask: torch.Tensor | None) -> Any:
        info = SimpleNamespace(draft_token_num=3, custom_mask=mask)
        return SimpleNamespace(spec_info=info, seq_lens=lengths)

    sparse_latents._require_chains(batch(None))
    sparse_latents._require_chains(batch(mask.flatten()))
    mask[1, 2, 1] = False
    with pytest.raises(NotImplementedError, match="chains of drafts"):
        sparse_latents._require_chains(batch(mask.flatten()))
    with pytest.raises(NotImplementedError, match="chains of drafts"):
        sparse_latents.DraftSteps(None, branches=2, steps=3)
