# SPDX-License-Identifier: Apache-2.0
"""What a server learns of a store when requests come, and how long they wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import pytest

from hybrid_plugin.config import ConfigError, HybridConfig, StoreOptions
from hybrid_plugin.core.tree.tokens import Tokens
from hybrid_plugin.engine.front_door import FrontDoor, IncomingRequest
from hybrid_plugin.engine.rank_store import RanksInStore, describe, measure
from hybrid_plugin.engine.store import Store
from tests.tiers.failing_store import FailingStore, Member
from tests.tiers.support import IDENTITY, as_tokens, bundle, layouts

OWN, TOKENS = layouts(), as_tokens(*range(300))
OPTIONS = StoreOptions(master="10.0.0.5:50051")
REQUEST = cast("IncomingRequest", object())


class Door:
    """Says what came."""

    def seek(self, request: object, look: Callable[[Hashable, Tokens], None]) -> None:
        look(None, TOKENS)


class SlowStore(FailingStore):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.may.set()

    def exist(self, names: Sequence[str]) -> list[bool]:
        assert self.may.wait(30)
        return super().exist(names)


@pytest.fixture
def objects() -> SlowStore:
    """With a bundle of 260 tokens, which another server has written."""
    made = SlowStore()
    other = Member(made, IDENTITY, OWN)
    other.store(bundle(OWN, None, TOKENS[:260]))
    other.settle()
    return made


def start(objects: SlowStore, patience: float = 20.0) -> Store:
    ranks = RanksInStore(IDENTITY, {IDENTITY.rank_name: OWN}, 1e9)
    log = logging.getLogger("test")
    made = Store(ranks, objects, log)
    made.patience = patience
    return made


def known(store: Store) -> int:
    found = store.tier.find(None, TOKENS, len(TOKENS) - 1)
    return found[-1].end if found else 0


def arrive(store: Store) -> None:
    store.arrived(cast("FrontDoor", Door()), REQUEST)


def test_an_arriving_request_waits_for_a_store_that_answers(
    objects: SlowStore,
) -> None:
    store = start(objects)
    assert known(store) == 0
    arrive(store)
    assert known(store) == 260
    store.close()


def test_nobody_waits_for_one_that_was_late_until_it_is_in_time(
    objects: SlowStore,
) -> None:
    store = start(objects, patience=0.01)
    objects.may.clear()
    for _ in range(20):
        arrive(store)
    assert known(store) == 0 and len(store._out) == 8
    assert not store._is_in_time
    objects.may.set()
    store._thread.submit(int).result(30)
    store.step()
    assert known(store) == 260 and not store._out
    assert store._is_in_time, "the next one waits again"
    store.close()


def test_a_silent_store_is_told_of_once(
    objects: SlowStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = start(objects)
    objects.is_silent = True
    for _ in range(3):
        arrive(store)
    assert known(store) == 0
    assert caplog.messages == [
        "hybrid-plugin: the store does not answer: as the test asks."
    ]
    objects.is_silent = False
    arrive(store)
    assert known(store) == 260
    store.close()


def test_what_was_looked_up_for_other_weights_is_not_learned(
    objects: SlowStore,
) -> None:
    store = start(objects, patience=0.0)
    objects.may.clear()
    arrive(store)
    store.tier.renew("1")
    objects.may.set()
    store._thread.submit(int).result(30)
    store.step()
    assert store.tier.used_bytes == 0
    store.close()


def test_what_is_new_is_listed(objects: SlowStore) -> None:
    store = start(objects)
    storing = store.tier.begin_store(None, TOKENS[:100], 0, 10)
    assert storing is not None
    store.tier.stored(storing.key, None)
    store.step()
    store._thread.submit(int).result(30)
    assert any(b'"bundles"' in content for content in objects.objects.values())
    assert store.tier.news == []
    store.close()


def test_a_store_is_measured_and_described() -> None:
    objects = FailingStore()
    rates = measure(objects, OPTIONS)
    assert rates.read_bytes_per_second > 0 and not objects.objects
    line = describe(OPTIONS, rates, 2)
    assert "at 10.0.0.5:50051, to which each of 2 ranks lends" in line
    assert "private network" in line


@pytest.mark.parametrize("fault", ["is_full", "is_silent"])
def test_a_store_that_takes_nothing_is_refused(fault: str) -> None:
    objects = FailingStore()
    setattr(objects, fault, True)
    with pytest.raises(ConfigError, match="did not take and give back"):
        measure(objects, OPTIONS)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (5, "takes an object such as"),
        ({}, "needs a master"),
        ({"master": "x"}, "takes a host and a port"),
        ({"master": "x:1", "path": "/"}, "Unknown entry 'path'"),
        ({"master": "x:1", "weights": ""}, "is empty"),
        ({"master": "x:1", "weights": 5}, "takes a string"),
        ({"master": "x:1", "size": "much"}, "store.size: "),
        ({"master": "x:1", "size": -1}, "at least 0"),
        ({"master": "x:1", "size": True}, "takes a size such as"),
        ({"master": "x:1", "address": "here"}, "takes the IP address"),
        ({"master": "x:1", "address": "0.0.0.0"}, "nobody can connect to"),
    ],
)
def test_what_is_no_store(value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StoreOptions.from_value(value)


def test_a_store_is_an_option_beside_host_memory_and_no_disk() -> None:
    value = {"master": "m:1"}
    options = HybridConfig.from_mapping({"host_memory": "1GiB", "store": value})
    assert options.outer_options == (StoreOptions(master="m:1"),)
    assert options.has_outer_tiers
    with pytest.raises(ConfigError, match=r"^store needs host_memory"):
        HybridConfig.from_mapping({"store": value})
    disk = {"path": "/tmp/x", "size": 1}
    with pytest.raises(ConfigError, match=r"^store and disk would both keep"):
        HybridConfig.from_mapping({"host_memory": 1, "store": value, "disk": disk})


def test_a_store_by_its_entries() -> None:
    found = StoreOptions.from_value({"master": "m:1", "size": "2MiB", "weights": "w"})
    assert found == StoreOptions(master="m:1", size=2 << 20, weights="w")
