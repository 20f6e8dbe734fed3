# SPDX-License-Identifier: Apache-2.0
"""What the cache reads of a request: its name, its tokens, its namespace."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle


def sequence_id(handle: CacheRequestHandle) -> str:
    """Name of a request's sequence in the core.

    Clients choose request ids, and one may be used again while the request that had
    it before is still being aborted: the handle, an object of one request, is not.
    """
    return f"{handle.rid}#{id(handle):x}"


def namespace(extra_key: Any, cache_salt: Any) -> Hashable:
    """What the whole request must have in common with another.

    SGLang puts the LoRA adapter into the extra key.  It replaces multimodal
    placeholders by a hash of their content, so tokens say the rest.

    Args:
        extra_key: of the request: a string or None, unless SGLang lets more pass.
        cache_salt: the same.
    """
    return (_hashable(extra_key), _hashable(cache_salt))


def known_tokens(req: Req) -> array[int]:
    """All tokens of the request that are known by now, of type code `q`."""
    tokens: array[int] = req.origin_input_ids + req.output_ids
    return tokens


def cacheable(req: Req) -> bool:
    """Whether the request's tokens say all about it: embeddings do not."""
    return (
        not req.skip_radix_cache_insert
        and req.input_embeds is None
        and req.positional_embed_overrides is None
    )


def wants_every_row(req: Req) -> bool:
    """Whether the client gets the hidden state of each token that is computed.

    SGLang returns those of a prompt's last chunk only.
    """
    return req.return_hidden_states is True


def _hashable(value: Any) -> Hashable:
    if value is None or isinstance(value, str):
        return value
    return type(value).__name__, repr(value)
