# SPDX-License-Identifier: Apache-2.0
"""Events of the prefix cache on fake requests: SGLang's hashes and fields."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_context

from tests.sglang.fakes import PAGE, Bench, request


class Publishing(Bench):
    events = True


class ForDynamo(Publishing):
    dynamo = True


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


def of_sglang(tokens: list[int], *, dynamo: bool = False, **space: Any) -> list[Any]:
    """What SGLang itself records where its tree gets one node with these tokens."""
    recorder = KVCacheEventRecorder(
        enabled=True,
        page_size=PAGE,
        dynamo_format=dynamo,
        lora_names=KvEventLoraNames(),
    )
    root = SimpleNamespace(
        parent=None, hash_value=[], event_hash_value=None, key=RadixKey(array("q"))
    )
    node = SimpleNamespace(
        parent=root,
        key=RadixKey(array("q", tokens), **space),
        hash_value=None,
        event_hash_value=None,
    )
    recorder.record_store(node)
    return recorder.take()


def serve(bench: Bench, rid: str, tokens: list[int], **fields: Any) -> list[Any]:
    """Run a whole request; returns what became known by it."""
    req = request(rid, tokens, **fields)
    bench.queue(req)
    assert bench.step() == [rid]
    while req.extend_end < len(tokens):
        assert bench.step() == [rid]
    bench.finish(req)
    return bench.cache.take_events()


def test_a_turn_is_announced_as_sglang_does() -> None:
    bench = Publishing()
    events = serve(bench, "a", list(range(10)))
    assert events == of_sglang(list(range(8)))
    (stored,) = events
    assert len(stored.block_hashes) == 2
    assert stored.parent_block_hash is None
    assert stored.token_ids == list(range(8))
    assert stored.block_size == PAGE
    assert stored.medium == StorageMedium.GPU
    assert bench.cache.take_events() == []


def test_a_branch_names_its_parent() -> None:
    bench = Publishing()
    (first,) = serve(bench, "a", list(range(16)))
    (branch,) = serve(bench, "b", [*range(8), *range(50, 58)])
    assert branch.parent_block_hash == first.block_hashes[1]
    (whole,) = of_sglang([*range(8), *range(50, 58)])
    assert branch.block_hashes == whole.block_hashes[2:]


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(
    "space",
    [
        {"cache_salt": "tenant"},
        {"extra_key": "a"},
        {"extra_key": "a", "cache_salt": ""},
    ],
)
def test_namespaces_are_named_as_sglang_names_them(
    *, dynamo: bool, space: dict[str, str]
) -> None:
    bench = ForDynamo() if dynamo else Publishing()
    events = serve(bench, "a", list(range(12)), **space)
    assert events == of_sglang(list(range(12)), dynamo=dynamo, **space)


def test_evicted_states_take_their_pages_with_them() -> None:
    bench = Publishing()
    (stored,) = serve(bench, "a", list(range(10)))
    assert bench.core.tree.evict_snapshot() is not None
    assert bench.cache.take_events() == [
        BlockRemoved(block_hashes=stored.block_hashes[::-1], medium=StorageMedium.GPU)
    ]


def test_a_flush_is_announced() -> None:
    bench = Publishing()
    serve(bench, "a", list(range(10)))
    bench.step()
    bench.cache.reset()
    assert bench.cache.take_events() == [AllBlocksCleared()]


def test_the_engines_own_types_decode_them() -> None:
    batch = KVEventBatch(ts=1.5, events=serve(Publishing(), "a", list(range(10))))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    (stored,) = decoded.events
    assert isinstance(stored, BlockStored)
    assert stored == batch.events[0]


def test_nothing_is_collected_unless_asked_for() -> None:
    bench = Bench()
    assert serve(bench, "a", list(range(10))) == []
    assert bench.core.tree.events is None
