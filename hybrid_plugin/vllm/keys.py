# SPDX-License-Identifier: Apache-2.0
"""What, besides token ids, must be equal for a request to reuse a prefix."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NUMBERS = 1 << 63
"""How many negative numbers a token of 64 bits has."""


class RequestKeys:
    """Turns a request into the namespace and the tokens the core compares.

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

    @staticmethod
    def namespace(request: Request) -> Hashable:
        """What the whole request must have in common with another."""
        lora = request.lora_request.lora_name if request.lora_request else None
        salt: object = request.cache_salt
        if lora is None and salt is None:
            return None
        # A salt that is no string cannot come from vLLM's own front end.
        return lora, salt if salt is None or isinstance(salt, str) else repr(salt)

    @staticmethod
    def tokens(request: Request) -> Sequence[int]:
        """All tokens of the request that are known, by content."""
        ids = request.all_token_ids
        if not request.mm_features:
            return ids
        keyed = list(ids)
        for feature in request.mm_features:
            first = _number(feature.identifier)
            start, length = feature.mm_position.offset, feature.mm_position.length
            keyed[start : start + length] = [
                -1 - (first + offset) % _NUMBERS for offset in range(length)
            ]
        return keyed

    @staticmethod
    def cacheable(request: Request) -> bool:
        """Whether the request's tokens say all about it: embeddings do not."""
        return request.prompt_embeds is None


def _number(identifier: str) -> int:
    """A hash of 63 bits, from 0."""
    digest = blake2b(identifier.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _NUMBERS
