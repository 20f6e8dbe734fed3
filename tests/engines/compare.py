# SPDX-License-Identifier: Apache-2.0
"""Whether two runs gave the same greedy answers.

With kernels in 16 bits, a sum taken in another order (another batch, a state
restored instead of computed in the same chunk) moves a logit by rounding.  So
an answer may leave the reference, but only where the reference itself was
undecided: the first token that differs must have been as likely, but for a
small bound, as the one the reference chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.engines.server import Answer


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
    compared = differing = 0
    worst = 0.0
    wrong: list[str] = []
    for index, (expected, got) in enumerate(zip(reference, answers, strict=True)):
        if expected.aborted or got.aborted:
            continue
        compared += 1
        if got.error is not None:
            wrong.append(f"request {index} failed: {got.error}")
            continue
        position = _first_difference(expected.tokens, got.tokens)
        if position is None:
            continue
        differing += 1
        gap = _gap(expected, got, position)
        worst = max(worst, gap)
        if gap > bound:
            wrong.append(
                f"request {index} ({expected.prompt_tokens} tokens, "
                f"{got.cached_tokens} cached) differs at token {position} by {gap:.3f}"
            )
    return Comparison(compared, differing, worst, tuple(wrong))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for position in range(max(len(a), len(b))):
        if a[position : position + 1] != b[position : position + 1]:
            return position
    return None


def _gap(expected: Answer, got: Answer, position: int) -> float:
    """How much less likely, to the reference, was the other token."""
    if position >= min(len(expected.tokens), len(got.tokens)):
        return float("inf")
    top = expected.logprobs[position]
    chosen = top[expected.tokens[position]]
    other = top.get(got.tokens[position])
    return float("inf") if other is None else chosen - other
