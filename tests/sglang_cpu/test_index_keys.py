# SPDX-License-Identifier: Apache-2.0
"""Index keys of several tokens: made by prefills and steps, cut in any places."""

from __future__ import annotations

from dataclasses import dataclass

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
