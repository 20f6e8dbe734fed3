# SPDX-License-Identifier: Apache-2.0
"""Ends of messages, found by the delimiter tokens of a chat template.

All chats with the same system message share its end.  A snapshot there can be taken for
the first chat, so that the second one already hits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hybrid_plugin.core.tree.tokens import Tokens

_SYSTEM, _USER, _OTHER = "alpha", "bravo", "tempo"
"""Contents that templates leave unchanged, with different first and last letters."""


class ChatTemplate(Protocol):
    """The required part of a tokenizer; those of `transformers` have it."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render `conversation` to token ids."""


@dataclass(frozen=True, slots=True)
class Delimiters:
    """Token ids around messages."""

    system_start: tuple[int, ...]
    """First tokens of a sequence with a system message."""
    message_end: tuple[int, ...]
    """End of the system message, and in most templates of every message."""

    def __post_init__(self) -> None:
        if not self.message_end:
            raise ValueError("the end of a message is marked by at least one token")

    @classmethod
    def of_template(cls, template: ChatTemplate) -> Delimiters | None:
        """Derive the delimiters from a chat template.

        Returns:
            None for a template without a system message, or without a delimiter token
            after it.
        """
        try:
            first = _render(template, _SYSTEM, _USER)
            second = _render(template, _OTHER, _USER)
            third = _render(template, _SYSTEM, _OTHER)
        except Exception:
            # Templates are programs: some raise on a system message.
            return None
        start = _alike(first, second)
        common_end = _alike(first[::-1], second[::-1])
        user_start = _alike(first, third)
        end = first[len(first) - common_end : user_start]
        if not end or user_start <= start:
            return None
        return cls(tuple(first[:start]), tuple(end[:1]))

    def ends(self, tokens: Tokens) -> list[int]:
        """Positions directly after each message, ascending."""
        ids = np.frombuffer(tokens, np.int64)
        found: list[int] = np.flatnonzero(ids == self.message_end[0]).tolist()
        size = len(self.message_end)
        if size > 1:
            pattern = array("q", self.message_end)
            found = [at for at in found if tokens[at : at + size] == pattern]
        return [at + size for at in found]

    def system_end(self, tokens: Tokens, ends: Sequence[int]) -> int:
        """Position directly after the system message; 0 if there is none.

        Args:
            tokens: of the sequence.
            ends: the result of `ends`.
        """
        start = len(self.system_start)
        if not ends or tuple(tokens[:start]) != self.system_start:
            return 0
        return next((end for end in ends if end > start), 0)


def _render(template: ChatTemplate, system: str, user: str) -> list[int]:
    conversation = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
    ]
    rendered = template.apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=False, return_dict=False
    )
    return list(rendered)


def _alike(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    both = zip(left, right, strict=False)
    return next(
        (i for i, (a, b) in enumerate(both) if a != b), min(len(left), len(right))
    )
