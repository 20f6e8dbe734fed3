# SPDX-License-Identifier: Apache-2.0
"""Logprobs of answers in a file, and whether two files have the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Answer:
    """What came back for a prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """Of each token of the answer: logprobs by token, of all or of the likeliest."""
    cached: int
    """Tokens of the prompt that were restored."""


def save(path: Path, answers: Sequence[Answer]) -> None:
    """Write answers, in the order of their prompts.

    Raises:
        ValueError: if an answer's tokens and logprobs do not go together.
    """
    for answer in answers:
        if len(answer.tokens) != len(answer.logprobs) or not answer.tokens:
            raise ValueError(
                f"{len(answer.tokens)} tokens have {len(answer.logprobs)} logprobs."
            )
    rows = [row for answer in answers for row in answer.logprobs]
    names = [sorted(row) for row in rows]
    np.savez_compressed(
        path,
        lengths=np.array([len(answer.tokens) for answer in answers], np.int32),
        cached=np.array([answer.cached for answer in answers], np.int32),
        tokens=np.array([t for answer in answers for t in answer.tokens], np.int32),
        widths=np.array([len(row) for row in rows], np.int32),
        ids=np.array([token for found in names for token in found], np.int32),
        values=np.array(
            [
                row[token]
                for row, found in zip(rows, names, strict=True)
                for token in found
            ],
            np.float32,
        ),
    )


def load(path: Path) -> list[Answer]:
    """Read what `save` wrote."""
    with np.load(path) as file:
        data = {name: file[name].tolist() for name in file.files}
    answers, at, token_at = [], 0, 0
    for length, cached in zip(data["lengths"], data["cached"], strict=True):
        logprobs = []
        for width in data["widths"][token_at : token_at + length]:
            ids, values = data["ids"][at : at + width], data["values"][at : at + width]
            logprobs.append(dict(zip(ids, values, strict=True)))
            at += width
        tokens = tuple(data["tokens"][token_at : token_at + length])
        token_at += length
        answers.append(Answer(tokens, tuple(logprobs), cached))
    return answers


@dataclass(frozen=True)
class Difference:
    """Between two answers to one prompt."""

    prompt: int
    position: int
    """Of the first token whose logprobs differ."""
    largest: float
    """Of the differences there, in nats; infinite where only one has a token."""
    tokens_too: bool
    """Whether the answers' tokens differ, there or later."""


def differences(one: Sequence[Answer], other: Sequence[Answer]) -> list[Difference]:
    """All prompts whose answers do not have the same bits.

    Raises:
        ValueError: if they are not answers to the same number of prompts.
    """
    if len(one) != len(other):
        raise ValueError(f"{len(one)} answers beside {len(other)}.")
    found = []
    for prompt, (a, b) in enumerate(zip(one, other, strict=True)):
        rows = zip(a.logprobs, b.logprobs, strict=False)
        apart = [n for n, (x, y) in enumerate(rows) if not _same_bits(x, y)]
        if len(a.tokens) != len(b.tokens):
            apart.append(min(len(a.tokens), len(b.tokens)))
        if apart or a.tokens != b.tokens:
            position = apart[0] if apart else 0
            largest = _largest(a.logprobs[position:], b.logprobs[position:])
            found.append(Difference(prompt, position, largest, a.tokens != b.tokens))
    return found


def _same_bits(a: Mapping[int, float], b: Mapping[int, float]) -> bool:
    if sorted(a) != sorted(b):
        return False
    left = np.array([a[token] for token in sorted(a)], np.float32)
    right = np.array([b[token] for token in sorted(a)], np.float32)
    return left.tobytes() == right.tobytes()


def _largest(
    a: Sequence[Mapping[int, float]], b: Sequence[Mapping[int, float]]
) -> float:
    """At the first position: later ones follow other tokens."""
    if not a or not b or a[0].keys() != b[0].keys():
        return float("inf")
    return max(abs(a[0][token] - b[0][token]) for token in a[0])


def told(name: str, found: Sequence[Difference], answers: Sequence[Answer]) -> str:
    """A line about one comparison."""
    restored = sum(answer.cached > 0 for answer in answers)
    line = (
        f"{name}: {len(found)} of {len(answers)} differ; "
        f"{restored} were restored in part"
    )
    if not found:
        return line
    largest = max(one.largest for one in found)
    tokens = sum(one.tokens_too for one in found)
    first = found[0]
    return (
        f"{line}; by at most {largest:.3g} nats, {tokens} in their tokens; the first "
        f"is prompt {first.prompt} at token {first.position}"
    )
