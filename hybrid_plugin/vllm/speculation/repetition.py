# SPDX-License-Identifier: Apache-2.0
"""Answers that repeat themselves, which end requests that ask for it, on the device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_plugin.device.arena import to_device


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a request counts as a repetition."""

    shortest: int
    longest: int
    """Tokens of what is repeated, at least and at most."""
    count: int
    """How often it must stand there, one behind the other."""

    @classmethod
    def of(cls, sampling_params: Any) -> Pattern | None:
        """What vLLM's sampling parameters ask for; None if for nothing."""
        asked = sampling_params.repetition_detection
        if asked is None:
            return None
        shortest = max(asked.min_pattern_size, 1)
        if asked.min_count < 2 or shortest > asked.max_pattern_size:
            return None
        return cls(shortest, asked.max_pattern_size, asked.min_count)


class Repetitions:
    """What repetitions end each request of a model runner, by the request's row."""

    def __init__(self, rows: int, device: torch.device) -> None:
        """Begin without requests.

        Args:
            rows: requests at once, at most.
            device: of the model.
        """
        self._asked: dict[int, Pattern] = {}
        self._table = torch.zeros(rows, 5, dtype=torch.int64, device=device)
        """Shortest and longest pattern, its count, where the answer begins, and tokens
        that it has at least."""

    def add(
        self, row: int, pattern: Pattern | None, prompt_length: int, min_tokens: int
    ) -> None:
        """Note a request.

        Args:
            row: of it from now on.
            pattern: that ends it; None if none does.
            prompt_length: tokens in front of its answer.
            min_tokens: of the answer before which no repetition ends it.
        """
        if pattern is None:
            if self._asked.pop(row, None) is not None:
                self._table[row] = 0
            return
        self._asked[row] = pattern
        line = [pattern.shortest, pattern.longest, pattern.count]
        numbers = torch.tensor([*line, prompt_length, min_tokens])
        self._table[row] = to_device(numbers, self._table.device)

    def ends(
        self,
        present: Collection[int],
        sampled: torch.Tensor,
        rows: torch.Tensor,
        computed: torch.Tensor,
        known: torch.Tensor,
    ) -> torch.Tensor | None:
        """Which tokens complete a repetition.

        Args:
            present: rows of the batch, on the host.
            sampled: ``[N, L]``, what a step gave each request, in order.
            rows: ``[N]``, those of the batch on the device.
            computed: by row, tokens computed before the step; one more was known.
            known: by row, its tokens in order.

        Returns:
            ``[N, L]``; None if no request of the batch asks for it.
        """
        asked = [self._asked[row] for row in present if row in self._asked]
        if not asked:
            return None
        rows = rows.long()
        computed = computed[rows]
        longest = max(pattern.longest for pattern in asked)
        window = max(pattern.longest * pattern.count for pattern in asked)
        shortest, most, count, start, least = self._table[rows].T[:, :, None]

        # [N, window + L]: the last known tokens and the new ones, and where they stand.
        last = torch.arange(1 - window, 1, device=sampled.device)
        places = computed[:, None] + last
        text = known[rows[:, None], places.clamp(min=0)].to(sampled.dtype)
        text = torch.cat([text, sampled], dim=1)
        new = computed[:, None] + 1 + torch.arange(sampled.shape[1], device=rows.device)
        places = torch.cat([places, new], dim=1)

        # [N, P, window + L]: whether a token is that of one pattern before, and the
        # length of the run of such tokens that ends there.
        sizes = torch.arange(1, longest + 1, device=rows.device)
        order = torch.arange(text.shape[1], device=rows.device)
        before = (order - sizes[:, None]).clamp(min=0)
        inside = (places[:, None] - sizes[:, None] >= start[:, None]) & (
            order >= sizes[:, None]
        )
        same = (text[:, None] == text[:, before]) & inside
        total = same.cumsum(-1)
        run = total - torch.where(same, 0, total).cummax(-1).values
        enough = run >= (sizes * (count - 1))[:, :, None]
        allowed = (sizes >= shortest) & (sizes <= most)
        found = (enough & allowed[:, :, None]).any(1)[:, window:]
        answered: torch.Tensor = new + 1 - start >= least
        return found & answered
