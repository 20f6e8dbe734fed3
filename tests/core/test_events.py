# SPDX-License-Identifier: Apache-2.0
"""Events of pages that come and go, as routers put them together."""

from __future__ import annotations

import ast
import importlib.util
import random
from array import array
from collections.abc import Hashable
from pathlib import Path

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tree.events import (
    Cleared,
    Event,
    EventLog,
    PagesRemoved,
    PagesStored,
    sha256_chain,
)
from tests.core.support import NO_SNAPSHOTS, ByMinimum, serve, span

PAGE = 4


def make(pages: int = 40, states: bool = True) -> tuple[HybridCache, EventLog]:
    log = EventLog()
    policy = SnapshotPolicy(PAGE, NO_SNAPSHOTS)
    slots = SlotPool(9) if states else NoSlots()
    return HybridCache(
        PagePool(pages), slots, PAGE, policy, events=log, eviction=ByMinimum()
    ), log


def keys(tokens: tuple[int, ...], namespace: Hashable = None) -> list[object]:
    """Of all whole pages of a sequence."""
    found, key = [], None
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        page = array("q", tokens[start : start + PAGE])
        key = sha256_chain(key, page, namespace)
        found.append(key)
    return found


class Router:
    """Knows which pages a cache has by its events alone."""

    def __init__(self) -> None:
        self.known: set[object] = set()

    def hear(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case PagesStored():
                    assert event.parent is None or event.parent in self.known
                    assert len(event.tokens) == len(event.keys) * event.page_size
                    assert not self.known & set(event.keys), "stored twice"
                    self.known |= set(event.keys)
                case PagesRemoved():
                    assert set(event.keys) <= self.known, "removed without stored"
                    self.known -= set(event.keys)
                case Cleared():
                    self.known.clear()


class TestEvents:
    def test_a_prompt_is_stored_page_by_page(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 9), namespace="adapter")
        (event,) = log.take()
        expected = keys(span(0, 9), "adapter")
        assert event == PagesStored(
            "adapter", None, tuple(expected), array("q", range(8)), PAGE
        )
        assert log.take() == []

    def test_a_branch_names_its_parent(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 16))
        log.take()
        other = (*span(0, 8), *span(50, 58))
        serve(cache, "b", other)
        (event,) = log.take()
        assert isinstance(event, PagesStored)
        assert event.parent == keys(span(0, 16))[1]
        assert list(event.keys) == keys(other)[2:]

    def test_evicted_pages_are_removed(self) -> None:
        cache, log = make(pages=6, states=False)
        serve(cache, "a", span(0, 16))
        log.take()
        serve(cache, "b", span(100, 108))
        removed, stored = log.take()
        # Four of five pages hold `a`, and two are needed.
        assert removed == PagesRemoved(tuple(keys(span(0, 16))[3:]))
        assert isinstance(stored, PagesStored)

    def test_flush(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 16))
        log.take()
        assert cache.flush()
        assert log.take() == [Cleared()]

    def test_keys_tell_namespaces_and_positions_apart(self) -> None:
        same = array("q", [1, 2, 3, 4])
        first = sha256_chain(None, same, None)
        assert first != sha256_chain(None, same, "adapter")
        assert first != sha256_chain(first, same, None)
        assert first == sha256_chain(None, array("q", [1, 2, 3, 4]), None)

    def test_an_engine_brings_its_own_hash(self) -> None:
        log = EventLog(
            hasher=lambda parent, tokens, namespace: bytes(tokens.tolist()[:1])
        )
        policy = SnapshotPolicy(PAGE, NO_SNAPSHOTS)
        cache = HybridCache(PagePool(9), SlotPool(3), PAGE, policy, events=log)
        serve(cache, "a", span(0, 8))
        (event,) = log.take()
        assert isinstance(event, PagesStored)
        assert event.keys == (b"\0", b"\4")


@pytest.mark.parametrize("states", [True, False])
def test_a_router_always_knows_what_is_cached(states: bool) -> None:
    rng = random.Random(3)
    cache, log = make(pages=24, states=states)
    router, seen = Router(), [span(0, 20)]
    for number in range(400):
        base = rng.choice(seen[-6:])[: rng.randrange(20)]
        tokens = (*base, *[rng.randrange(3) for _ in range(rng.randrange(2, 25))])
        namespace = rng.choice((None, None, "adapter"))
        seen.append(tokens)
        serve(cache, str(number), tokens, (9, 9), namespace)
        if rng.random() < 0.02:
            cache.flush()
        router.hear(log.take())
        assert router.known == _cached(cache)
    assert cache.stats.pages_evicted > 100


def _cached(cache: HybridCache) -> set[object]:
    """Keys of all whole pages in the tree."""
    found: set[object] = set()
    for namespace, root in cache.tree._roots.items():
        pending = [(root, ())]
        while pending:
            node, before = pending.pop()
            tokens = (*before, *node.tokens)
            found |= set(keys(tokens, namespace))
            pending += [(child, tokens) for child in node.children.values()]
    return found


@pytest.mark.parametrize(
    ("module", "stored", "removed"),
    [
        ("vllm.distributed.kv_events", "BlockStored", "BlockRemoved"),
        ("sglang.srt.disaggregation.kv_events", "BlockStored", "BlockRemoved"),
    ],
)
def test_the_engines_events_say_no_more(module: str, stored: str, removed: str) -> None:
    """Their required fields can all be filled from ours."""
    root = importlib.util.find_spec(module.split(".")[0])
    if root is None or root.submodule_search_locations is None:
        pytest.skip(f"{module} is not installed")
    path = Path(root.submodule_search_locations[0], *module.split(".")[1:])
    classes = {
        node.name: [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and item.value is None
            and isinstance(item.target, ast.Name)
        ]
        for node in ast.parse(path.with_suffix(".py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    ours = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"}
    assert set(classes[stored]) <= ours | {"medium", "lora_name"}
    assert set(classes[removed]) <= {"block_hashes", "medium"}
    assert "AllBlocksCleared" in classes
