# SPDX-License-Identifier: Apache-2.0
"""The cache's events in SGLang's format, by SGLang's own recorder.

SGLang's events know no groups of layers: they name the pages that a request can resume
at or behind.  Its scheduler takes them and gives them to the publisher of
`--kv-events-config`, one for each rank with a cache of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey

from hybrid_plugin.core.commands import Pool
from hybrid_plugin.core.tree.events import Cleared, EventLog, PagesRemoved, PagesStored

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from hybrid_plugin.core.cache import HybridCache
    from hybrid_plugin.core.tree.events import Key
    from hybrid_plugin.core.tree.tokens import Tokens


class Block:
    """One page, as the recorder reads a node of SGLang's tree."""

    __slots__ = ("event_hash_value", "hash_value", "key", "parent")

    def __init__(self, key: RadixKey, parent: Block | None) -> None:
        """A page that no event names yet.

        Args:
            key: its tokens and namespace.
            parent: the page before; the root before the first; None for the root.
        """
        self.key = key
        self.parent = parent
        self.hash_value: list[str] | None = None
        """Computed and kept by the recorder, as the next one."""
        self.event_hash_value: list[str] | None = None


_ROOT = Block(RadixKey(array("q")), None)
_ROOT.hash_value = []


class KvEvents:
    """Records what the core's log collects."""

    def __init__(self, cache: HybridCache, params: CacheInitParams) -> None:
        """Have an empty cache report.

        Args:
            cache: of this rank.
            params: of SGLang: the format, and the names of adapters.
        """
        windows = tuple(group.window for group in cache.windows)
        self._log = EventLog(cache.page_size, windows, _blocks)
        cache.report_to(self._log)
        self._recorder = KVCacheEventRecorder(
            enabled=True,
            page_size=cache.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )

    def take(self) -> list[Any]:
        """All events since the last call, in SGLang's format."""
        for event in self._log.take():
            match event:
                case PagesStored(pool=Pool.KV):
                    for block in event.keys:
                        self._recorder.record_store(block)
                case PagesRemoved(pool=Pool.KV):
                    for block in event.keys:
                        self._recorder.record_remove(block)
                case Cleared():
                    self._recorder.record_all_cleared()
        return self._recorder.take()


def _blocks(
    parent: Key | None, pages: Iterator[Tokens], namespace: Hashable
) -> Iterator[Block]:
    """The pages behind `parent` in a namespace, as `requests.namespace` says it."""
    assert parent is None or isinstance(parent, Block), "all of them are made here"
    assert isinstance(namespace, tuple), "as requests name it"
    extra_key, salt = map(_text, namespace)
    block = _ROOT if parent is None else parent
    for tokens in pages:
        key = RadixKey(tokens, extra_key=extra_key, cache_salt=salt)
        block = Block(key, block)
        yield block


def _text(value: Hashable) -> str | None:
    return value if value is None or isinstance(value, str) else repr(value)
