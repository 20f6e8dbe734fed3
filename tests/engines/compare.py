# SPDX-License-Identifier: Apache-2.0
"""Whether two runs gave the same greedy answers, request by request.

`hybrid_plugin.tools.demo.compare` says what equal means where rounding differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_plugin.tools.demo.compare import first_difference
from tests.engines.messages import Answer


@dataclass(frozen=True)
class Comparison:
    """The outcome over many answers."""

    compared: int
    differing: int
    worst_gap: float
    """Largest logprob the reference gave up at a first difference."""
    wrong: tuple[str, ...]
    """Differences beyond the bound, described."""


def compare(
    reference: Sequence[Answer], answers: Sequence[Answer], bound: float
) -> Comparison:
    """Compare answers that were not aborted in either run.

    Args:
        reference: answers with logprobs.
        answers: to the same requests.
        bound: in nats, how undecided the reference must be at a difference;
            0 asks for equality.
    """
    compared, gaps, wrong = 0, [], []
    for index, (expected, got) in enumerate(zip(reference, answers, strict=True)):
        if expected.aborted or got.aborted:
            continue
        compared += 1
        if got.error is not None:
            wrong.append(f"request {index} failed: {got.error}")
            continue
        found = first_difference(expected, got)
        if found is None:
            continue
        gaps.append(found.gap)
        if found.gap > bound:
            wrong.append(
                f"request {index} ({expected.prompt_tokens} tokens, "
                f"{got.cached_tokens} cached) differs at token {found.position} "
                f"by {found.gap:.3f}"
            )
    return Comparison(compared, len(gaps), max(gaps, default=0.0), tuple(wrong))
