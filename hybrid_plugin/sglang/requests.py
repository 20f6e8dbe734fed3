# SPDX-License-Identifier: Apache-2.0
"""What the cache reads of a request: its name, its tokens, its namespace."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_plugin.engine.hit_checks import Run

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    from hybrid_plugin.core.sequence import Admission


RUN = "hybrid_check_run"
"""Attribute of a request of ours that checks a hit: which run it is."""


def sequence_id(handle: CacheRequestHandle) -> str:
    """Name of a request's sequence in the core.

    Clients choose request ids, and one may be used again while the request that had
    it before is still being aborted: the handle, an object of one request, is not.
    """
    return f"{handle.rid}#{id(handle):x}"


def namespace(extra_key: Any, cache_salt: Any) -> Hashable:
    """What a whole request must have in common with another.

    SGLang puts the LoRA adapter into the extra key.  It replaces multimodal
    placeholders by a hash of their content, so tokens say the rest.

    Args:
        extra_key: of the request: a string or None, unless SGLang lets more pass.
        cache_salt: the same.
    """
    return (_hashable(extra_key), _hashable(cache_salt))


@dataclass(frozen=True, slots=True)
class SGLangRequest:
    """A request of SGLang as the front door sees it."""

    req: Req
    cut: bool = False
    """Whether its answer ends where SGLang cut it.  A step of several tokens may have
    gone on behind a stop; one of a single token ends with it."""

    @property
    def seq_id(self) -> str:
        """Name of its sequence."""
        return sequence_id(self.req.cache_request_handle)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the output that are known by now."""
        return len(self.req.origin_input_ids) + len(self.req.output_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens that it will have at most."""
        answer: int = self.req.sampling_params.max_new_tokens
        return len(self.req.origin_input_ids) + answer

    def tokens(self) -> array[int]:
        """A copy of those tokens, of type code `q`."""
        output: array[int] = self.req.output_ids
        if self.cut and self.req.finished_len is not None:
            output = output[: self.req.finished_len]
        tokens: array[int] = self.req.origin_input_ids + output
        return tokens

    def namespace(self) -> Hashable:
        """What the whole request must have in common with another."""
        return namespace(self.req.extra_key, self.req.cache_salt)

    @property
    def cacheable(self) -> bool:
        """Whether the request's tokens say all about it: embeddings do not."""
        return (
            not self.req.skip_radix_cache_insert
            and self.req.input_embeds is None
            and self.req.positional_embed_overrides is None
        )

    @property
    def may_hit(self) -> bool:
        """Whether it may be served from the cache.

        SGLang has no request that writes to the cache and does not read; of a check of
        ours one does neither.
        """
        return getattr(self.req, RUN, None) is not Run.COMPUTED

    @property
    def is_check(self) -> bool:
        """Whether it is one of ours, that checks a hit."""
        return hasattr(self.req, RUN)

    @property
    def may_pause(self) -> bool:
        """Whether the client is content with what a prompt's last chunk gives.

        Of hidden states SGLang returns those of that chunk only.
        """
        return self.req.return_hidden_states is not True

    @property
    def hint(self) -> object:
        """What came with the request for plugins."""
        return self.req.sampling_params.custom_params

    @property
    def resumed(self) -> bool:
        """Whether it ran before and was retracted."""
        return bool(self.req.retracted_stain)

    def note_sources(self, admission: Admission) -> None:
        """Tell the client where its cached tokens were: SGLang's own answer has fields.

        SGLang finds it out itself when the first chunk is prepared, for its own
        hierarchical cache, unless it is known by then.
        """
        if self.resumed:
            return
        brought = admission.from_host + admission.fetched
        self.req.cached_tokens_device = admission.hit - brought
        self.req.cached_tokens_host = admission.from_host
        self.req.cached_tokens_storage = admission.fetched
        self.req._cache_breakdown_computed = True

    @property
    def is_over(self) -> bool:
        """Whether it was finished or aborted; a retracted one is not."""
        return bool(self.req.finished())


def _hashable(value: Any) -> Hashable:
    if value is None or isinstance(value, str):
        return value
    return type(value).__name__, repr(value)
