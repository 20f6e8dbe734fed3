# SPDX-License-Identifier: Apache-2.0
"""Where requests end among accepted drafts: token by token, reference and kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hybrid_kernels import stops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Switch = Callable[[], AbstractContextManager[None]]
# A fixture's switch is as good for the next example.
RUNS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
LENGTH = 4
"""Tokens of a step."""
ROWS = 6
WIDTH = 3
"""Stop tokens that there is room for."""
requests = st.tuples(
    st.lists(st.integers(0, 5), min_size=LENGTH, max_size=LENGTH),
    st.integers(0, LENGTH),
    st.sets(st.integers(0, 5), max_size=WIDTH),
    st.integers(1, 30),
    st.integers(0, 12),
    st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
)
"""Tokens and how many count, stop tokens, greatest length, tokens computed, and which
tokens end the request for another reason."""
Request = tuple[list[int], int, set[int], int, int, list[bool]]


def kept(request: Request, *, others: bool) -> int:
    """As a scheduler cuts an answer, token by token."""
    tokens, count, ids, longest, computed, reasons = request
    for place, token in enumerate(tokens[:count]):
        reached = computed + 2 + place >= longest
        if token in ids or reached or (others and reasons[place]):
            return place + 1
    return count


@pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_what_counts_ends_where_a_scheduler_would_cut(
    device: str, on_triton: Switch, triton: bool, kind: torch.dtype
) -> None:
    with on_triton() if triton else nullcontext():

        @given(
            st.lists(requests, min_size=1, max_size=ROWS),
            st.integers(0, ROWS - 1),
            st.booleans(),
        )
        @settings(max_examples=20 if triton else 60, **RUNS)
        def check(batch: list[Request], shift: int, others: bool) -> None:
            rows = [(number + shift) % ROWS for number in range(len(batch))]
            ids = torch.full((ROWS, WIDTH), stops.NO_TOKEN)
            lengths, computed = torch.zeros(ROWS), torch.zeros(ROWS)
            sampled = torch.tensor([tokens for tokens, *_ in batch])
            for row, line, request in zip(rows, sampled, batch, strict=True):
                _, count, ended_by, lengths[row], computed[row], _ = request
                ids[row, : len(ended_by)] = torch.tensor(sorted(ended_by))
                line[count:] = -1  # as rejection samplers pad
            reasons = torch.tensor([reason for *_, reason in batch])
            counts = torch.tensor([count for _, count, *_ in batch])
            found = stops.cut(
                sampled.to(device),
                counts.to(device, kind),
                (LENGTH - counts).to(device, kind),
                torch.tensor(rows, device=device),
                stops.Ends(
                    ids.to(device),
                    lengths.to(device, torch.int64),
                    computed.to(device, torch.int32),
                    reasons.to(device) if others else None,
                ),
            )
            wanted = [kept(request, others=others) for request in batch]
            assert found.sampled.tolist() == wanted
            assert found.sampled.dtype == found.rejected.dtype == kind
            # What was sampled and what was rejected stay as many together.
            total = (found.sampled + found.rejected).tolist()
            assert total == [LENGTH] * len(batch)

        check()


def test_a_stop_that_is_not_counted_shows() -> None:
    """Negative control: with another stop token more is kept."""
    given = (
        torch.tensor([[7, 8, 9, 9]]),
        torch.tensor([4]),
        torch.tensor([0]),
        torch.tensor([0]),
    )
    for stop, wanted in ((8, 2), (3, 4)):
        ends = stops.Ends(torch.tensor([[stop]]), torch.tensor([99]), torch.tensor([5]))
        assert stops.cut(*given, ends).sampled.tolist() == [wanted]


def test_tables_that_do_not_fit_are_refused() -> None:
    one = torch.tensor([1])
    ends = stops.Ends(torch.tensor([[8]]), torch.tensor([99]), torch.tensor([5]))
    with pytest.raises(ValueError, match="num_sampled has shape"):
        stops.cut(torch.zeros(2, 4).long(), one, one, one, ends)
    with pytest.raises(ValueError, match=r"sampled is torch\.float32"):
        stops.cut(torch.zeros(1, 4), one, one, one, ends)
