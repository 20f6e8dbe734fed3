# SPDX-License-Identifier: Apache-2.0
"""A request's tokens, and what besides tokens must be equal to reuse a prefix."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def namespace_of(req: Req) -> Hashable:
    """What the whole request must have in common with another.

    SGLang puts the LoRA adapter into the extra key.  It replaces multimodal
    placeholders by a hash of their content, so tokens say the rest.
    """
    return (req.extra_key, req.cache_salt)


def known_tokens(req: Req) -> array[int]:
    """All tokens of the request that are known by now, of type code `q`."""
    tokens: array[int] = req.origin_input_ids + req.output_ids
    return tokens


def cacheable(req: Req) -> bool:
    """Whether the request's tokens say all about it: embeddings do not."""
    return not req.skip_radix_cache_insert and req.input_embeds is None
