# SPDX-License-Identifier: Apache-2.0
"""Events of the manager on fake requests: vLLM's names, groups and fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.vllm.kv_events import KvEvents
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from tests.vllm.fakes import PAGE, admit, compute, image, manager, pools, request


def hashes(one: Any) -> list[Any]:
    """What vLLM itself calls the blocks of a request."""
    init_none_hash(sha256)
    asked = SimpleNamespace(
        block_hashes=[], **{name: getattr(one, name) for name in _READ}
    )
    found = get_request_block_hasher(PAGE, sha256)(asked)
    return [maybe_convert_block_hash(key) for key in found]


_READ = (
    "num_tokens",
    "all_token_ids",
    "mm_features",
    "lora_request",
    "cache_salt",
    "prompt_embeds",
)


def publishing() -> HybridKVCacheManager:
    """A manager that publishes events."""
    planned = pools()
    return HybridKVCacheManager(
        planned,
        HybridConfig(),
        watermark=0.0,
        log_stats=False,
        kv_events=KvEvents(planned, "sha256"),
    )


def serve(of: Any, one: Any) -> list[Any]:
    """Run a whole request; returns what became known by it."""
    admit(of, one, one.num_tokens)
    of.drain_commands()
    compute(of, one, one.num_tokens)
    of.free(one)
    return of.take_events()


def test_a_turn_is_announced_by_vllms_hashes() -> None:
    of = publishing()
    one = request("one", 2 * PAGE)
    names = hashes(one)
    assert serve(of, one) == [
        BlockStored(
            block_hashes=names,
            parent_block_hash=None,
            token_ids=list(range(2 * PAGE)),
            block_size=PAGE,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None, None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockStored(
            block_hashes=names[1:],
            parent_block_hash=names[0],
            token_ids=list(range(PAGE, 2 * PAGE)),
            block_size=PAGE,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None],
            group_idx=1,
            kv_cache_spec_kind="mamba",
        ),
    ]
    assert of.take_events() == []


def test_the_engines_own_types_decode_them() -> None:
    of = publishing()
    batch = KVEventBatch(ts=1.5, events=serve(of, request("one", 3 * PAGE)))
    encoded = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.Decoder(KVEventBatch).decode(encoded) == batch
    (_, events, _) = msgspec.msgpack.decode(encoded)
    assert [event["type"] for event in events] == ["BlockStored"] * 2


def test_adapter_and_salt_are_named_as_vllm_names_them() -> None:
    of = publishing()
    adapter = LoRARequest("poems", 7, "/adapters/poems")
    one = request("one", 2 * PAGE, lora_request=adapter, cache_salt="tenant")
    names = hashes(one)
    kv, state = serve(of, one)
    assert kv.block_hashes == names
    assert kv.extra_keys == [("poems", "tenant"), ("poems",)]
    assert state.extra_keys == [("poems",)]
    assert (kv.lora_name, kv.lora_id) == ("poems", 7)
    assert hashes(request("two", 2 * PAGE))[0] != names[0]


def test_evicted_states_take_their_pages_with_them() -> None:
    of = publishing()
    one = request("one", 2 * PAGE)
    names = hashes(one)
    serve(of, one)
    assert of.cache.tree.evict_snapshot() is not None
    assert of.take_events() == [
        BlockRemoved(block_hashes=names[1:], medium="GPU", group_idx=1),
        BlockRemoved(block_hashes=names[::-1], medium="GPU", group_idx=0),
    ]


def test_a_flush_is_announced() -> None:
    of = publishing()
    serve(of, request("one", 2 * PAGE))
    assert of.reset_prefix_cache()
    assert of.take_events() == [AllBlocksCleared()]


def test_pages_up_to_an_image_are_announced() -> None:
    of = publishing()
    picture = image("picture", offset=PAGE + 3, length=5)
    one = request("one", 3 * PAGE, mm_features=[picture])
    (kv,) = serve(of, one)
    assert kv.block_hashes == hashes(request("two", 3 * PAGE))[:1]
    assert min(kv.token_ids) >= 0


def test_a_request_may_have_its_hit_reported() -> None:
    of = publishing()
    stored = serve(of, request("one", 2 * PAGE))
    of.get_computed_blocks(request("two", 3 * PAGE))
    assert of.take_events() == []
    of.get_computed_blocks(request("three", 3 * PAGE, kv_cache_report_mode="full"))
    assert of.take_events() == stored
    of.get_computed_blocks(
        request("four", 3 * PAGE, first=900, kv_cache_report_mode="full")
    )
    assert of.take_events() == []


def test_nothing_is_collected_unless_asked_for() -> None:
    of = manager()
    assert serve(of, request("one", 2 * PAGE)) == []
    assert of.cache.tree.events is None
