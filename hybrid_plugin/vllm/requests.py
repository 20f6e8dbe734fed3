# SPDX-License-Identifier: Apache-2.0
"""What the cache reads of a request: its tokens, its namespace, its hints."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from hybrid_plugin.vllm.adapters import Adapters, namespace_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NUMBERS = 1 << 63
"""How many negative numbers a token of 64 bits has."""


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """A request of vLLM as the front door sees it.

    LoRA adapter and cache salt name a namespace: nothing is shared across it.
    A multimodal item is a run of equal placeholder tokens whose meaning is its
    content, so each of them is replaced by a negative number that stands for
    (content, position in the item); real token ids are never negative.

    The numbers are counted from a hash of the item's content identifier, so they
    need no table and are equal in every process and after a restart.  Two items are
    confused only where they stand at the same position behind equal tokens and their
    hashes of 63 bits are equal.  Among a million items that happens with a chance of
    1 in 18 million; somebody who wants to hit a given item of somebody else has to
    try about 2^63 contents.  Who has to exclude even that separates users by
    `cache_salt`.
    """

    request: Request
    adapters: Adapters = field(default_factory=Adapters)
    """Of the engine core."""
    is_check: bool = False
    """Whether it is one of ours, that checks a hit."""

    @property
    def seq_id(self) -> str:
        """Name of its sequence."""
        return str(self.request.request_id)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and of the output before a preemption."""
        return int(self.request.num_tokens)

    @property
    def max_tokens(self) -> int:
        """Tokens that it will have at most."""
        return int(self.request.num_prompt_tokens + self.request.max_tokens)

    def tokens(self) -> Sequence[int]:
        """A copy of all tokens that are known, by content."""
        ids = self.request.all_token_ids[:]
        for feature in self.request.mm_features:
            first = _number(feature.identifier)
            start, length = feature.mm_position.offset, feature.mm_position.length
            ids[start : start + length] = [
                -1 - (first + offset) % _NUMBERS for offset in range(length)
            ]
        return ids

    def namespace(self) -> Hashable:
        """What the whole request must have in common with another."""
        salt = self.request.cache_salt
        return namespace_of(self.request.lora_request, salt, self.adapters)

    @property
    def cacheable(self) -> bool:
        """Whether the tokens say all about it: embeddings do not."""
        return self.request.prompt_embeds is None

    @property
    def may_hit(self) -> bool:
        """Whether vLLM lets it read from the cache."""
        return not self.request.skip_reading_prefix_cache

    @property
    def may_pause(self) -> bool:
        """True: vLLM collects what it returns of a prompt over all its chunks."""
        return True

    @property
    def hint(self) -> object:
        """What came with the request for plugins."""
        parameters = self.request.sampling_params
        return parameters.extra_args if parameters else None

    @property
    def resumed(self) -> bool:
        """Whether it ran before and was preempted."""
        return bool(self.request.num_preemptions > 0)

    @property
    def is_over(self) -> bool:
        """Whether it was finished or aborted; a preempted one is not."""
        return bool(self.request.is_finished())


def _number(identifier: str) -> int:
    """A hash of 63 bits, from 0."""
    digest = blake2b(identifier.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _NUMBERS
