# SPDX-License-Identifier: Apache-2.0
"""The cache's events in vLLM's format, for vLLM's own publisher.

Blocks have the names that vLLM itself would give them, so routers that compute vLLM's
block hashes find them.  The scheduler takes events with each step's output and gives
them to the publisher of `--kv-events-config`, one for each data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    hash_block_tokens,
    init_none_hash,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from hybrid_plugin.core.sequence import LookUp
from hybrid_plugin.core.tree.events import (
    Cleared,
    Event,
    EventLog,
    Key,
    PagesRemoved,
    PagesStored,
)
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.vllm.planning import HybridKVCacheConfig, pools_of

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request


class _Name(NamedTuple):
    """Of a block."""

    digest: Any
    published: Any
    """The same as `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` wants it in events."""


class KvEvents:
    """Turns what the core's log collects into vLLM's events."""

    def __init__(
        self, kv_cache_config: HybridKVCacheConfig, hash_algorithm: str
    ) -> None:
        """Start with an empty log.

        Args:
            kv_cache_config: the planned pools.
            hash_algorithm: of `--prefix-caching-hash-algo`.
        """
        layout = kv_cache_config.plan.layout
        self.log = EventLog(layout.page_size, layout.attention_windows, self._name)
        self._hash = get_hash_fn_by_name(hash_algorithm)
        # vLLM does this where its own prefix caching is on.
        init_none_hash(self._hash)
        groups = kv_cache_config.kv_cache_groups
        self._pools = pools_of(groups)
        self._kinds = [
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in groups
        ]
        self._adapters: dict[Hashable, Any] = {}
        """The LoRA requests, by what names them in namespaces."""

    def learn(self, request: Request, namespace: Hashable) -> None:
        """Name a request's adapter in events, if it has one.

        Call it before anything enters the cache in its namespace.

        Args:
            request: vLLM's.
            namespace: of its content in the cache.
        """
        if request.lora_request is not None:
            assert isinstance(namespace, tuple), "as requests name it"
            self._adapters[namespace[0]] = request.lora_request

    def note(self, request: Request, found: LookUp) -> None:
        """Announce a request's hit once more if it asks for that, for routers that were
        started late.
        """
        node = found.match.node
        if node is not None and request.kv_cache_report_mode == "full":
            self.log.repeat(node, found.namespace)

    def take(self) -> list[KVCacheEvent]:
        """All events since the last call, in vLLM's format."""
        return [one for event in self.log.take() for one in self._converted(event)]

    def _converted(self, event: Event) -> list[KVCacheEvent]:
        """One event for each group whose layers have the pool's pages."""
        match event:
            case PagesStored():
                return [self._stored(event, index) for index in self._groups(event)]
            case PagesRemoved():
                return [self._removed(event, index) for index in self._groups(event)]
            case Cleared():
                return [AllBlocksCleared()]

    def _groups(self, event: PagesStored | PagesRemoved) -> list[int]:
        return [i for i, pool in enumerate(self._pools) if pool == event.pool]

    def _stored(self, event: PagesStored, group: int) -> BlockStored:
        adapter, _ = self._origin(event.namespace)
        kind, window = self._kinds[group]
        extra = [self._extra_keys(event.namespace, first=False)] * len(event.keys)
        if event.parent is None:
            extra[0] = self._extra_keys(event.namespace, first=True)
        return BlockStored(
            block_hashes=_published(event.keys),
            parent_block_hash=(
                None if event.parent is None else _published([event.parent])[0]
            ),
            token_ids=event.tokens.tolist(),
            block_size=event.page_size,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM_GPU,
            lora_name=adapter.name if adapter else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def _removed(self, event: PagesRemoved, group: int) -> BlockRemoved:
        hashes = _published(event.keys)
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM_GPU, group_idx=group)

    def _name(
        self, parent: Key | None, pages: Iterator[Tokens], namespace: Hashable
    ) -> Iterator[_Name]:
        """vLLM's hashes of blocks, up to the first one with a part of an image.

        The numbers that stand for its content in the cache are not vLLM's.
        """
        assert parent is None or isinstance(parent, _Name), "all of them are made here"
        digest = None if parent is None else parent.digest
        first, others = [
            self._extra_keys(namespace, first=one) for one in (True, False)
        ]
        for tokens in pages:
            if min(tokens) < 0:
                return
            extra = first if digest is None else others
            digest = hash_block_tokens(self._hash, digest, tokens, extra)
            yield _Name(digest, maybe_convert_block_hash(digest))

    def _extra_keys(
        self, namespace: Hashable, *, first: bool
    ) -> tuple[Any, ...] | None:
        """What vLLM's hash of a block covers beside its tokens."""
        adapter, salt = self._origin(namespace)
        origin = SimpleNamespace(
            lora_request=adapter, cache_salt=salt, mm_features=(), prompt_embeds=None
        )
        # Only whether the block is the first one counts.
        start = 0 if first else 1
        keys, _ = generate_block_hash_extra_keys(origin, start, start + 1, 0)
        return keys

    def _origin(self, namespace: Hashable) -> tuple[Any, str | None]:
        """Adapter and salt of the requests of a namespace; see `VllmRequest`."""
        if namespace is None:
            return None, None
        assert isinstance(namespace, tuple), "as requests name it"
        name, salt = namespace
        return None if name is None else self._adapters[name], salt


def _published(keys: Iterable[Key]) -> list[Any]:
    return [key.published for key in keys if isinstance(key, _Name)]
