# SPDX-License-Identifier: Apache-2.0
"""Requests of which one server computes the prompt, and another one the answer.

Both know it by `kv_transfer_params`, as with vLLM's own connectors; no connector is
needed, because the scheduler reads and fills them itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_plugin.tiers.peers.params import wants_remote_decode

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LEFT = "_hybrid_last_token_left"
"""Entry of a request's parameters, as NixlConnector has one for the same."""


def leave_last_token(request: Request) -> None:
    """Have the prompt of a request computed but for its last token, and no answer.

    The server that goes on computes that token itself, and so needs the state before
    it.  What this one samples is no answer: routers drop it.

    Args:
        request: that is not queued yet.
    """
    if not wants_remote_decode(request.kv_transfer_params):
        return
    last = request.num_prompt_tokens - 1
    ids = request.prompt_token_ids
    if (
        last < 1
        or ids is None
        or request.resumable
        or request.skip_reading_prefix_cache  # as will be the other server's
        or any(_covers(feature, last) for feature in request.mm_features)
    ):
        return
    # The front end may hold the list itself.
    request.prompt_token_ids = ids[:last]
    del request._all_token_ids[last:]
    request.num_prompt_tokens = last
    request.max_tokens = 1
    request.kv_transfer_params = {**request.kv_transfer_params, _LEFT: True}


def tokens_for_others(request: Request) -> int:
    """Tokens of a prompt, computed here, that another server can resume from at most.

    Args:
        request: that ended.
    """
    is_left = _LEFT in request.kv_transfer_params
    return int(request.num_prompt_tokens) - (not is_left)


def _covers(feature: Any, position: int) -> bool:
    """Whether a multimodal item has a token's place."""
    place = feature.mm_position
    return bool(place.offset <= position < place.offset + place.length)
