# SPDX-License-Identifier: Apache-2.0
"""What, besides token ids, must be equal for a request to reuse a prefix."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestKeys:
    """Turns a request into the namespace and the tokens the core compares.

    LoRA adapter and cache salt name a namespace: nothing is shared across it.
    A multimodal item is a run of equal placeholder tokens whose meaning is its
    content, so each of them is replaced by a negative number that stands for
    (content, position in the item); real token ids are never negative.
    """

    _SPAN = 1 << 32

    def __init__(self) -> None:
        self._items: dict[str, int] = {}

    def namespace(self, request: Request) -> Hashable:
        """What the whole request must have in common with another."""
        lora = request.lora_request.lora_name if request.lora_request else None
        if lora is None and request.cache_salt is None:
            return None
        return lora, request.cache_salt

    def tokens(self, request: Request) -> Sequence[int]:
        """All tokens of the request that are known, by content."""
        ids = request.all_token_ids
        if not request.mm_features:
            return ids
        keyed = list(ids)
        for feature in request.mm_features:
            item = self._items.setdefault(feature.identifier, len(self._items) + 1)
            start, length = feature.mm_position.offset, feature.mm_position.length
            keyed[start : start + length] = [
                -(item * self._SPAN + offset) for offset in range(length)
            ]
        return keyed

    @staticmethod
    def cacheable(request: Request) -> bool:
        """Whether the request's tokens say all about it: embeddings do not."""
        return request.prompt_embeds is None
