# SPDX-License-Identifier: Apache-2.0
"""Events of pages that can be resumed at, as routers put them together."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from array import array
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest

from hybrid_plugin.core.cache import HybridCache
from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import SlidingWindow, live_pages
from hybrid_plugin.core.memory.pools import NoSlots, PagePool, SlotPool
from hybrid_plugin.core.memory.window_tables import WindowGroup
from hybrid_plugin.core.policy.snapshot_positions import SnapshotPolicy
from hybrid_plugin.core.tree.events import (
    Cleared,
    Event,
    EventLog,
    Key,
    PagesRemoved,
    PagesStored,
    sha256_chain,
)
from hybrid_plugin.core.tree.node import Node
from hybrid_plugin.core.tree.tokens import Tokens
from tests.core.support import NO_SNAPSHOTS, ByMinimum, Tiers, serve, span, start
from tests.core.traffic import Traffic

PAGE = 4


def make(
    pages: int = 40,
    slots: int = 9,
    *,
    states: bool = True,
    window: int = 0,
    log: EventLog | None = None,
) -> tuple[HybridCache, EventLog]:
    windows = (SlidingWindow(window),) if window else ()
    log = EventLog(PAGE, windows) if log is None else log
    cache = HybridCache(
        PagePool(pages),
        SlotPool(slots) if states else NoSlots(),
        PAGE,
        SnapshotPolicy(PAGE, NO_SNAPSHOTS),
        eviction=ByMinimum(branch=NO_SNAPSHOTS),
        windows=tuple(WindowGroup(one, PagePool(pages)) for one in windows),
    )
    cache.report_to(log)
    return cache, log


def keys(tokens: tuple[int, ...], namespace: Hashable = None) -> tuple[Key, ...]:
    """Of all whole pages of a sequence."""
    starts = range(0, len(tokens) - PAGE + 1, PAGE)
    pages = [array("q", tokens[first : first + PAGE]) for first in starts]
    return tuple(sha256_chain(None, pages, namespace))


def chained(parent: Key | None, tokens: Tokens, namespace: Hashable = None) -> Key:
    """Of one page."""
    (key,) = sha256_chain(parent, [tokens], namespace)
    return key


class Router:
    """Knows what a cache has by its events alone."""

    def __init__(self) -> None:
        self.known: dict[PoolId, set[Key]] = {}
        self.parents: dict[Key, Key | None] = {}

    def hear(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case PagesStored():
                    self._store(event)
                case PagesRemoved():
                    self._remove(event)
                case Cleared():
                    self.known.clear()

    def _store(self, event: PagesStored) -> None:
        assert event.keys
        assert len(event.tokens) == len(event.keys) * event.page_size
        known = self.known.setdefault(event.pool, set())
        pages = self.known.get(Pool.KV, set())
        assert not known & set(event.keys), "stored twice"
        if event.pool == Pool.KV:
            assert event.parent is None or event.parent in pages, "an unknown parent"
            parents = (event.parent, *event.keys[:-1])
            self.parents |= dict(zip(event.keys, parents, strict=True))
        else:
            assert set(event.keys) <= pages, "stored before its KV"
            assert self.parents[event.keys[0]] == event.parent
        size = event.page_size
        for index, key in enumerate(event.keys):
            tokens = event.tokens[index * size : (index + 1) * size]
            assert chained(self.parents[key], tokens, event.namespace) == key
        known |= set(event.keys)

    def _remove(self, event: PagesRemoved) -> None:
        assert event.keys
        for key in event.keys:
            self.known[event.pool].remove(key)
            if event.pool == Pool.KV:
                still = {self.parents[one] for one in self.known[Pool.KV]}
                assert key not in still, "removed before what follows it"
                assert all(key not in known for known in self.known.values())

    def deepest(self, tokens: tuple[int, ...], namespace: Hashable = None) -> int:
        """Where a request should resume."""
        found = 0
        for index, key in enumerate(keys(tokens, namespace)):
            if key not in self.known.get(Pool.KV, ()):
                break
            if key in self.known.get(Pool.STATE, ()):
                found = (index + 1) * PAGE
        return found


class TestEvents:
    def test_a_turn_is_stored_with_its_state(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 8), (8,), namespace="adapter")
        pages = keys(span(0, 8), "adapter")
        assert log.take() == [
            PagesStored(Pool.KV, "adapter", None, pages, array("q", range(8)), PAGE),
            PagesStored(
                Pool.STATE, "adapter", pages[0], pages[1:], array("q", range(4, 8)), 4
            ),
        ]
        assert log.take() == []
        assert log.announced_pages == 2

    def test_kv_without_a_state_is_not_announced(self) -> None:
        cache, log = make()
        start(cache, "a", span(0, 12))
        cache.advance("a", 12)
        cache.finish("a", span(0, 12), 13)  # the state has seen a token nobody knows
        assert cache.tree.match(None, array("q", range(12)), 11).kv_length == 12
        assert log.take() == []

    def test_a_turn_inside_a_page_ends_at_the_page_before(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 10), (10,))
        kv, state = log.take()
        assert isinstance(kv, PagesStored)
        assert isinstance(state, PagesStored)
        assert kv.keys == keys(span(0, 8))
        assert state.keys == kv.keys[1:]
        router = Router()
        router.hear([kv, state])
        assert router.deepest(span(0, 30)) == 8
        assert cache.look_up(span(0, 30)).match.length == 10

    def test_a_turn_within_the_first_page_is_not_announced(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 3), (3,))
        assert cache.look_up(span(0, 30)).match.length == 3
        assert log.take() == []
        assert cache.tree.evict_snapshot() is not None
        assert log.take() == []

    def test_several_turns_may_end_within_one_page(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 10), (10,))
        log.take()
        serve(cache, "b", (*span(0, 8), 77), (78,))
        assert log.take() == []
        assert cache.tree.evict_snapshot() is not None
        assert log.take() == []
        assert cache.tree.evict_snapshot() is not None
        assert log.take() == [
            PagesRemoved(Pool.STATE, keys(span(0, 8))[1:]),
            PagesRemoved(Pool.KV, keys(span(0, 8))[::-1]),
        ]

    def test_a_branch_names_its_parent(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 16), (16,))
        log.take()
        other = (*span(0, 8), *span(50, 58))
        serve(cache, "b", other, (58,))
        stored = [event for event in log.take() if event.pool == Pool.KV]
        assert [event.parent for event in stored] == [keys(other)[1]]
        assert [event.keys for event in stored] == [keys(other)[2:]]

    def test_pages_whose_state_is_evicted_are_removed(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 8), (8,))
        serve(cache, "b", span(0, 16), (16,))
        log.take()
        # The turn that "b" resumed from goes first: its pages lead to the other.
        assert cache.tree.evict_snapshot() is not None
        assert log.take() == [PagesRemoved(Pool.STATE, keys(span(0, 8))[1:])]
        assert cache.tree.evict_snapshot() is not None
        assert log.take() == [
            PagesRemoved(Pool.STATE, keys(span(0, 16))[3:]),
            PagesRemoved(Pool.KV, keys(span(0, 16))[::-1]),
        ]
        assert cache.tree.match(None, array("q", range(16)), 15).kv_length == 16

    def test_what_is_resumable_again_is_stored_again(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 8), (8,))
        stored = log.take()
        cache.tree.evict_snapshot()
        log.take()
        serve(cache, "b", span(0, 8), (8,))
        assert log.take() == stored

    def test_without_states_every_page_is_announced(self) -> None:
        cache, log = make(pages=6, states=False)
        serve(cache, "a", span(0, 16))
        (event,) = log.take()
        assert isinstance(event, PagesStored)
        assert event.keys == keys(span(0, 16))
        serve(cache, "b", span(100, 108))
        removed, stored = log.take()
        # Four of five pages hold `a`, and two are needed.
        assert removed == PagesRemoved(Pool.KV, keys(span(0, 16))[3:])
        assert isinstance(stored, PagesStored)
        assert log.announced_pages == 5

    def test_windows_have_the_pages_that_resuming_needs(self) -> None:
        cache, log = make(window=6)
        serve(cache, "a", span(0, 16), (16,))
        pages = keys(span(0, 16))
        *_, window = log.take()
        # Token 16 sees those from 11 on.
        assert window == PagesStored(
            Pool.window(0), None, pages[1], pages[2:], array("q", range(8, 16)), PAGE
        )
        serve(cache, "b", span(0, 20), (20,))
        *_, window = log.take()
        assert isinstance(window, PagesStored)
        assert window.keys == keys(span(0, 20))[4:]

    def test_a_hit_can_be_reported_once_more(self) -> None:
        cache, log = make(window=6)
        serve(cache, "a", span(0, 10), (10,))
        stored = log.take()
        node = cache.look_up(span(0, 30)).match.node
        assert node is not None
        log.repeat(node, None)
        assert log.take() == stored
        assert log.announced_pages == 2

    def test_events_begin_with_an_empty_cache(self) -> None:
        cache, _ = make()
        serve(cache, "a", span(0, 8), (8,))
        with pytest.raises(ValueError, match="cached before"):
            cache.report_to(EventLog(PAGE))

    def test_flush(self) -> None:
        cache, log = make()
        serve(cache, "a", span(0, 16), (16,))
        log.take()
        assert cache.flush()
        assert log.take() == [Cleared()]
        assert log.announced_pages == 0

    def test_keys_tell_namespaces_and_positions_apart(self) -> None:
        same = array("q", [1, 2, 3, 4])
        first = chained(None, same)
        assert first != chained(None, same, "adapter")
        assert first != chained(first, same)
        assert first == chained(None, array("q", [1, 2, 3, 4]))

    def test_pages_without_a_name_end_what_is_announced(self) -> None:
        def name(
            parent: Key | None, pages: Iterator[Tokens], namespace: Hashable
        ) -> Iterator[Key]:
            text = itertools.takewhile(lambda tokens: min(tokens) >= 0, pages)
            return sha256_chain(parent, text, namespace)

        cache, log = make(window=6, log=EventLog(PAGE, (SlidingWindow(6),), name))
        image = (*span(0, 8), -5, -6, *span(8, 20))
        serve(cache, "a", image, (20,))
        (event,) = log.take()
        assert isinstance(event, PagesStored)
        assert event.keys == keys(span(0, 8))
        # A branch behind the image, and one before it.
        serve(cache, "b", (*image[:14], *span(50, 60)), (60,))
        assert log.take() == []
        serve(cache, "c", (*span(0, 8), *span(70, 79)), (79,))
        assert [event.pool for event in log.take()] == ["kv", "state", "window0"]
        while cache.tree.evict_snapshot() is not None:
            pass
        router = Router()
        router.known = {
            "kv": {*keys((*span(0, 8), *span(70, 79)))},
            "state": {keys((*span(0, 8), *span(70, 79)))[-1]},
            "window0": {*keys((*span(0, 8), *span(70, 79)))[2:]},
        }
        router.parents = dict.fromkeys(router.known["kv"])
        router.hear(log.take())
        assert not any(router.known.values())
        assert log.announced_pages == 0


class Reporting(HybridCache):
    """Has a router hear of all its events."""

    log_type = EventLog

    def __post_init__(self, tiers: Tiers) -> None:
        HybridCache.__post_init__(self, tiers)
        windows = tuple(group.window for group in self.windows)
        self.report_to(self.log_type(self.page_size, windows))


def run(
    seed: int,
    *,
    windows: bool = False,
    drafts: bool = False,
    log_type: type[EventLog] = EventLog,
) -> Traffic:
    """Random traffic; a router must know all that can be resumed, after every step."""
    cls = type("Watched", (Reporting,), {"log_type": log_type})
    traffic = Traffic.seeded(seed, PAGE, cls, windows=windows, drafts=drafts)
    cache, router = traffic.engine.cache, Router()
    log = cache.tree.events
    assert log is not None
    for _ in range(150):
        traffic.operate()
        router.hear(log.take())
        expected = _expected(cache)
        assert {pool: known for pool, known in router.known.items() if known} == {
            pool: known for pool, known in expected.items() if known
        }
        assert log.announced_pages == len(expected.get(Pool.KV, ()))
        _check_predictions(cache, router, traffic)
    return traffic


def _expected(cache: HybridCache) -> dict[PoolId, set[Key]]:
    """What can be resumed at or behind, by a walk over the whole tree."""
    found: dict[PoolId, set[Key]] = {}
    for namespace, root in cache.tree._roots.items():
        pending: list[tuple[Node, tuple[int, ...]]] = [(root, ())]
        while pending:
            node, before = pending.pop()
            tokens = (*before, *node.tokens)
            whole = len(tokens) // PAGE * PAGE
            path = keys(tokens, namespace)
            if node.snapshot is not None and whole:
                found.setdefault(Pool.KV, set()).update(path)
                found.setdefault(Pool.STATE, set()).add(path[-1])
                for index, group in enumerate(cache.windows):
                    live = live_pages(group.window, whole, PAGE)
                    held = found.setdefault(Pool.window(index), set())
                    held.update(path[live.start : live.stop])
            pending += [(child, tokens) for child in node.children.values()]
            pending += [(child, tokens) for child in node.tails.values()]
    return found


def _check_predictions(cache: HybridCache, router: Router, traffic: Traffic) -> None:
    for tokens in traffic.seen:
        asked = (*tokens, 9)
        match = cache.look_up(asked, None).match
        predicted = router.deepest(asked)
        assert match.length // PAGE * PAGE <= predicted <= match.kv_length
        if match.length == len(tokens):
            assert predicted == len(tokens) // PAGE * PAGE


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["states", "windows", "drafts"])
def test_a_router_always_knows_what_can_be_resumed(kind: str, seed: int) -> None:
    run(seed, windows=kind == "windows", drafts=kind == "drafts")


class KeepsWhatIsEvicted(EventLog):
    def detached(self, node: Node) -> None:
        pass


class RemovesWithTheFirstSnapshot(EventLog):
    """Does not see that other turns end within the same page."""

    def detached(self, node: Node) -> None:
        end = node.parent if node.is_tail else node
        if end in self._announced:
            self._announced[end].ends = 1
            EventLog.detached(self, node)


class ForgetsSplits(EventLog):
    def split(self, upper: Node, lower: Node, pages: int) -> None:
        pass


class AnnouncesStatesOnly(EventLog):
    """Leaves KV announced that leads nowhere."""

    def _retract(self, node: Node) -> None:
        pass


class RemovesFromTheRoot(EventLog):
    def _remove(self, pool: PoolId, keys: tuple[Key, ...]) -> None:
        EventLog._remove(self, pool, keys[::-1])


class ForgetsFlushes(EventLog):
    def cleared(self) -> None:
        self._pending.append(Cleared())


class NamesPagesByTheirTokens(EventLog):
    def _names(self, node: Node, namespace: Hashable) -> Iterator[Key]:
        for first in range(0, len(node.tokens), PAGE):
            yield chained(None, node.tokens[first : first + PAGE])


@pytest.mark.parametrize(
    "broken",
    [
        KeepsWhatIsEvicted,
        RemovesWithTheFirstSnapshot,
        ForgetsSplits,
        AnnouncesStatesOnly,
        RemovesFromTheRoot,
        ForgetsFlushes,
        NamesPagesByTheirTokens,
    ],
)
def test_a_broken_log_is_caught(broken: type[EventLog]) -> None:
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        for seed in range(12):
            run(seed, log_type=broken)


def test_windows_that_are_counted_wrong_are_caught() -> None:
    class KeepsWindows(EventLog):
        def _remove_window(self, pool: PoolId, end: Node, count: int) -> None:
            pass

    with pytest.raises(AssertionError):
        for seed in range(12):
            run(seed, windows=True, log_type=KeepsWindows)


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
