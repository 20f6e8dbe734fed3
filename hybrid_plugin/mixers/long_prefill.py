# SPDX-License-Identifier: Apache-2.0
"""Long passes of gated delta nets on a kernel that is faster there.

Such a kernel, FlashInfer's, hands out states at multiples of a step, counted from where
it starts.  Ours lie at absolute multiples of 64 tokens.  So a pass is divided:

* the *head*: of each sequence that goes on in the middle of a chunk, the tokens up to
  the next multiple of 64; our kernels run these few;
* the *body*: all tokens behind, which begin on that grid.  One call runs them, with the
  longest step that meets every multiple at which a state is to be kept.

States go from head to body through the slots, as they do between passes.  How long
sequences are and where they start is known on the host: nothing waits for the device.

The kernel's states on the way are transient.  There is at most one for each chunk of
64 tokens: in float32, of 128 x 128, 64 KiB for each value head.  Our own kernels take
as much for a chunk: in bfloat16 its start state, and its corrected keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from hybrid_kernels import state_copy
from hybrid_kernels.gated_delta_rule import Factors

from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.mixers.prefills import Body, Head, LongPass, Prefills

_SIZE = 128
"""Of a head's keys and values, in FlashInfer's kernel."""
_TOKEN_TYPES = frozenset({torch.bfloat16, torch.float16})
_STATE_TYPES = frozenset({torch.float32, *_TOKEN_TYPES})


@dataclass(frozen=True, slots=True)
class LongKernel:
    """What runs the bodies of long passes."""

    function: Callable[..., Any]
    """`flashinfer.gdn_prefill.chunk_gated_delta_rule`, or one called alike."""
    beyond: int
    """Tokens of a pass up to which our kernels run all of it."""

    def over(
        self,
        prefills: Prefills,
        starts: Sequence[int],
        lengths: Sequence[int],
        columns: Iterable[int],
    ) -> Prefills:
        """The pass, divided if it is long and may round as it likes.

        Args:
            prefills, starts, lengths, columns: as for `divide`.
        """
        if sum(lengths) <= self.beyond or prefills.round_states:
            return prefills
        long = divide(self.function, prefills, starts, lengths, columns)
        return replace(prefills, long=long)


@dataclass(frozen=True, slots=True)
class _Span:
    """What a sequence has in a pass; tokens are counted from the pass's first."""

    row: int
    first: int
    body: int
    """First token of the body."""
    end: int

    @property
    def is_aligned(self) -> bool:
        return self.body == self.first

    def column(self, chunks: int) -> int:
        """Of `boundary_slots`, for the state after so many chunks of the body.

        Column 0 is the first multiple of 64 behind the pass's start: of a sequence with
        a head that is the head's end.
        """
        return chunks - self.is_aligned


def divide(
    function: Callable[..., Any],
    prefills: Prefills,
    starts: Sequence[int],
    lengths: Sequence[int],
    columns: Iterable[int],
) -> LongPass | None:
    """Divide a pass; None if all of it is head.

    Args:
        function: as in `LongKernel`.
        prefills: its `N` sequences.
        starts: ``[N]``: tokens computed before, of which `prefills.offsets` has the
            remainders.
        lengths: ``[N]``: tokens in the pass, as `prefills.cu_seqlens` says.
        columns: of `prefills.boundary_slots`, all in which a slot may be named; none
            if the pass keeps no states.
    """
    spans = list(_spans(starts, lengths))
    bodies = [span for span in spans if span.end > span.body]
    if not bodies:
        return None
    heads = [span for span in spans if span.body > span.first]
    every = _step(bodies, columns)
    counts = [(span.end - span.body) // every for span in bodies]
    table, device = prefills.boundary_slots, prefills.slots.device
    width = 0 if table is None else table.shape[1]
    # Of each checkpoint, its place in the table; behind the table, which names none.
    places = [
        span.row * width + column if (column := span.column(chunks)) < width else -1
        for span, count in zip(bodies, counts, strict=True)
        for chunks in range(
            every // CHUNK, (count + 1) * every // CHUNK, every // CHUNK
        )
    ]
    ranges = [(span.body, span.end) for span in bodies]
    ends, rows = _sums(s.end - s.body for s in bodies), [s.row for s in bodies]
    fresh = [int(span.is_aligned) for span in bodies]
    upload = _upload([ends, _sums(counts), rows, fresh, places], device)
    cu_seqlens, checkpoint_starts, at, begins, place = upload
    slots = prefills.slots[at]
    continues = prefills.has_initial[at] | (begins == 0)
    kept = place
    if table is not None:
        kept = torch.where(place >= 0, table.reshape(-1)[place.clamp(min=0)], -1)
    body = Body(
        tokens=_tokens(ranges, device),
        neighbours=_neighbours(ranges),
        cu_seqlens=cu_seqlens,
        longest=max(span.end - span.body for span in bodies),
        slots=slots,
        sources=torch.where(continues, slots, -1),
        every=every,
        checkpoint_starts=checkpoint_starts,
        kept=kept,
    )
    head = _head(prefills, heads, device) if heads else None
    return LongPass(function, head, body)


def takes(long: LongPass, tokens: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether the kernel runs a layer.

    Args:
        long: the pass.
        tokens: of the type that queries, keys and values have.
        states: ``[S, HV, V, K]``.
    """
    # FlashInfer's kernel finds a checkpoint by a number of 32 bits.
    checkpoints = len(long.body.kept) * states.shape[1:].numel()
    return (
        checkpoints < 2**31
        and states.shape[2:] == (_SIZE, _SIZE)
        and states.stride()[1:] == (_SIZE * _SIZE, _SIZE, 1)
        and states.dtype in _STATE_TYPES
        and tokens.dtype in _TOKEN_TYPES
    )


def run_body(
    long: LongPass, factors: Factors, states: torch.Tensor, out: torch.Tensor
) -> None:
    """Run the body of a layer; leave its states in their slots.

    Args:
        long: the pass.
        factors: the body's tokens.
        states: ``[S, HV, V, K]``.
        out: ``[R, HV, V]``, contiguous; written.
    """
    body = long.body
    item, count = states.shape[1:], len(body.slots)
    initial = states.new_zeros(count, *item)
    state_copy.gather(initial, states, body.sources)
    initial = initial.float()
    final = torch.empty_like(initial)
    # Kernels are compiled for whether there are checkpoints: so there always are, and
    # the one tensor of a pass that has none is not written.
    checkpoints = states.new_empty(max(1, len(body.kept)), *item)
    long.function(
        q=factors.q,
        k=factors.k,
        v=factors.v,
        g=factors.decay,
        beta=factors.beta,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=body.cu_seqlens,
        output=out,
        output_state=final,
        state_checkpoints=checkpoints,
        checkpoint_cu_starts=body.checkpoint_starts,
        checkpoint_every_n_tokens=body.every,
        backend="flashinfer",
        max_seqlen=body.longest,
    )
    state_copy.scatter(states, body.slots, final.to(states.dtype))
    if len(body.kept):
        state_copy.scatter(states, body.kept, checkpoints)


def _spans(starts: Sequence[int], lengths: Sequence[int]) -> Iterable[_Span]:
    first = 0
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        head = min(length, -start % CHUNK)
        yield _Span(row, first, first + head, first + length)
        first += length


def _step(bodies: Sequence[_Span], columns: Iterable[int]) -> int:
    """Tokens between checkpoints: the most that meet all that may be wanted."""
    longest: dict[bool, int] = {}
    for span in bodies:
        chunks = (span.end - span.body) // CHUNK
        longest[span.is_aligned] = max(longest.get(span.is_aligned, 0), chunks)
    # Which sequence wants a column is known on the device alone.
    wanted = {
        chunks
        for column in columns
        for aligned, most in longest.items()
        if 0 < (chunks := column + aligned) <= most
    }
    if not wanted:  # a step that no sequence makes
        return CHUNK * (1 + max(longest.values()))
    return CHUNK * math.gcd(*wanted)


def _head(prefills: Prefills, heads: Sequence[_Span], device: torch.device) -> Head:
    table = prefills.boundary_slots
    ends = _sums(span.body - span.first for span in heads)
    bounds, at = _upload([ends, [span.row for span in heads]], device)
    return Head(
        _tokens([(span.first, span.body) for span in heads], device),
        Prefills(
            cu_seqlens=bounds.to(prefills.cu_seqlens.dtype),
            slots=prefills.slots[at],
            has_initial=prefills.has_initial[at],
            offsets=prefills.offsets[at],
            boundary_slots=None if table is None else table[at],
        ),
    )


def _sums(counts: Iterable[int]) -> list[int]:
    """Running sum, starting at 0."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def _tokens(ranges: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """The tokens of some ranges, in order; ``[n]``, int64."""
    side_by_side = _neighbours(ranges)
    if side_by_side is not None:
        return torch.arange(side_by_side.start, side_by_side.stop, device=device)
    every = [torch.arange(start, end) for start, end in ranges]
    return _to(torch.cat(every), device)


def _neighbours(ranges: Sequence[tuple[int, int]]) -> slice | None:
    """All of some ranges, if nothing lies between them."""
    if any(end != start for (_, end), (start, _) in pairwise(ranges)):
        return None
    return slice(ranges[0][0], ranges[-1][1])


def _upload(
    lists: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Lists as int64 tensors, in one copy; each begins at a multiple of 16 bytes."""
    starts = _sums(len(each) + len(each) % 2 for each in lists)
    whole = torch.zeros(starts[-1], dtype=torch.int64)
    for start, each in zip(starts, lists, strict=False):
        whole[start : start + len(each)] = torch.tensor(each, dtype=torch.int64)
    there = _to(whole, device)
    pairs = zip(starts, lists, strict=False)
    return tuple(there[start : start + len(each)] for start, each in pairs)


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
