# SPDX-License-Identifier: Apache-2.0
"""vLLMs that share a store: real managers and ranks, and a store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout

from hybrid_plugin.config import StoreOptions
from hybrid_plugin.core.commands import Fetch, Write
from hybrid_plugin.engine.rank_store import RanksInStore, RankStore
from hybrid_plugin.engine.rank_tiers import RankTiers
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.shelf import SUFFIX
from hybrid_plugin.vllm import manager as managers
from hybrid_plugin.vllm.kv_events import KvEvents
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.reports import Report
from hybrid_plugin.vllm.scheduler import HybridScheduler
from tests.tiers.failing_store import FailingStore
from tests.vllm import test_peers
from tests.vllm.fakes import admit, compute, manager, nothing_kept, pools
from tests.vllm.test_peers import HOST, LENGTH

IDENTITY = Identity("weights", "0" * 64, ("a0 full attention", "s0 state"), "float32")
OPTIONS = {"master": "localhost:50051"}


class Engine(test_peers.Engine):
    """A manager and one rank, with a store in the place of peers."""

    def __init__(self, objects: FailingStore, identity: Identity = IDENTITY) -> None:
        self.manager = manager(
            clock=lambda: 100.0,
            host=HOST,
            pages=11,
            slots=5,
            host_memory=HOST,
            store=OPTIONS,
        )
        config = pools(11, 5, HOST)
        memory = PoolMemory()
        memory.allocate(config, torch.device("cpu"), KVCacheLayout.LBNHC)
        backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        layouts = memory.layouts(config, {"a0": layer})
        assert config.host is not None
        host = memory.executor.attach_host(config.host)
        self.executor = memory.executor
        store = RankStore(
            host,
            StoreOptions(**OPTIONS),
            identity,
            layouts,
            join=lambda options, lent: objects,
        )
        self.rank = RankTiers(self.executor, lambda own: own, store=store)
        self.in_store = RanksInStore(identity, {identity.rank_name: layouts}, 1e9)
        self.read_seconds = 0.1

    def open(self) -> Engine:
        """The worker's first answer."""
        self.manager.take_report(Report(0.0, 1.0, 1e9, store=self.in_store))
        store = self.manager._outer
        assert store is not None and store.store is not None
        store.store.patience = 20.0
        return self

    def turn(self, name: str, first: int) -> None:
        """Compute a prompt, which is written to the store."""
        one = self.prompt(name, first)
        self.manager.arrives(one)
        assert not self.manager.must_wait(one)
        assert self.manager.get_computed_blocks(one)[1] == 0
        assert admit(self.manager, one, LENGTH) is not None
        self.step()
        sequence = self.manager.cache.sequence(name)
        for page, token in enumerate(range(0, LENGTH, 16)):
            self.page(sequence.pages[page]).fill_(first + token + 1)
        self.slot(sequence.slot).fill_(first + LENGTH)
        compute(self.manager, one, LENGTH)
        self.manager.free(one)
        commands = [*self.finish(), *self.step()]
        assert commands is not None
        self.list_news()

    def list_news(self) -> None:
        """Until directories list what was written, and look-ups are over."""
        outer = self.manager._outer
        assert outer is not None and outer.store is not None
        outer.store.step()
        outer.store._thread.submit(int).result(30)
        outer.store.step()

    def continued(self, name: str, first: int) -> int:
        """Tokens that a request with the same prompt resumes, and with right bytes."""
        one = self.prompt(name, first)
        self.manager.arrives(one)
        return self.serve(one)

    def close(self) -> None:
        self.manager.close()
        self.rank.close()


@pytest.fixture
def objects() -> FailingStore:
    return FailingStore()


@pytest.fixture
def start(
    objects: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    monkeypatch.setattr(managers, "join_store", lambda options, lent: objects)
    started: list[Engine] = []

    def begin(**fields: Any) -> Engine:
        started.append(Engine(objects, **fields))
        return started[-1].open()

    yield begin
    for engine in started:
        engine.close()


def test_one_computes_and_the_other_resumes(
    start: Callable[..., Engine], objects: FailingStore
) -> None:
    one, other = start(), start()
    for first in (1000, 2000):
        one.turn(f"p{first}", first)
        assert other.continued(f"d{first}", first) == LENGTH
    assert one.tier.stats.stores == 2 == other.tier.stats.loads
    assert other.tier.stats.hit_tokens == 2 * LENGTH
    other.finish()
    assert nothing_kept(one.manager) and nothing_kept(other.manager)


def test_requests_that_came_before_the_workers_answered_are_looked_up(
    start: Callable[..., Engine], objects: FailingStore
) -> None:
    start().turn("p", 1000)
    late = Engine(objects)
    one = late.prompt("d", 1000, over=False)
    late.manager.arrives(one)
    assert late.manager.must_wait(one)
    late.open().list_news()  # and take what was looked up, however late
    assert late.serve(one) == LENGTH
    late.close()


@pytest.mark.parametrize("harm", ["forgotten", "silent", "changed"])
def test_what_cannot_be_read_is_computed(
    start: Callable[..., Engine], objects: FailingStore, harm: str
) -> None:
    one, other = start(), start()
    one.turn("p", 1000)
    request = other.prompt("d", 1000)
    other.manager.arrives(request)
    for name in [name for name in objects.objects if "piece" in name]:
        if harm == "forgotten":
            del objects.objects[name]
        elif harm == "changed":
            content = bytearray(objects.objects[name])
            content[-1] ^= 1
            objects.objects[name] = bytes(content)
    objects.is_silent = harm == "silent"
    assert other.serve(request) == 0
    (reason,) = other.tier.stats.load_failures
    assert reason in {Reason.MISSING, Reason.IO, Reason.CORRUPT}
    objects.is_silent = False
    other.finish()
    assert nothing_kept(other.manager)


def test_other_models_and_updated_weights_share_nothing(
    start: Callable[..., Engine], objects: FailingStore
) -> None:
    one = start()
    one.turn("p", 1000)
    assert start(identity=replace(IDENTITY, weights="others")).continued("d", 1000) == 0
    other = start()
    other.rank.weights_changed()
    other.step()
    before = {name for name in objects.objects if name.endswith(SUFFIX)}
    assert other.continued("d", 1000) == 0
    other.finish()
    after = {name for name in objects.objects if name.endswith(SUFFIX)}
    assert before <= after


def test_commands_name_the_store(start: Callable[..., Engine]) -> None:
    one = start()
    one.turn("p", 1000)
    other = start()
    request = other.prompt("d", 1000)
    other.manager.arrives(request)
    other.manager.step_begins()
    assert other.manager.must_wait(request)
    commands = other.step()
    (fetch,) = [command for command in commands if isinstance(command, Fetch)]
    assert fetch.source == "store"
    assert not any(isinstance(command, Write) for command in commands)
    assert other.serve(request) == LENGTH


def test_events_name_an_adapter_that_only_other_servers_have_served(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it has computed is restored before its first request is looked up."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    adapter = LoRARequest("tuned", 1, str(tmp_path))
    prompt = Engine.prompt
    monkeypatch.setattr(
        Engine, "prompt", lambda *args: prompt(*args, lora_request=adapter)
    )
    one, other = start(), start()
    one.turn("p", 1000)
    events = KvEvents(pools(11, 5, HOST), "sha256")
    other.manager._kv_events = events
    other.manager.cache.report_to(events.log)
    assert other.continued("d", 1000) == LENGTH
    found = other.manager.take_events()
    named = {event.lora_name for event in found if isinstance(event, BlockStored)}
    assert named == {"tuned"}


def test_a_part_of_a_session_is_no_request(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM queues each by the name of the first, which the store was asked for."""
    engine = start()
    scheduler: Any = HybridScheduler.__new__(HybridScheduler)
    scheduler.kv_cache_manager, scheduler.requests = engine.manager, {}
    scheduler._has_peers, scheduler._has_store = False, True
    queued: list[Any] = []

    def add_request(self: Any, request: Any) -> None:
        queued.append(self.requests.setdefault(request.request_id, request))

    monkeypatch.setattr(Scheduler, "add_request", add_request)
    first = engine.prompt("session", 1000)
    for part in (first, engine.prompt("session", 5000), engine.prompt("session", 9000)):
        scheduler.add_request(part)
    assert queued == [first] * 3
    assert not engine.manager.must_wait(first)
    admit(engine.manager, first, LENGTH)
    engine.step()
    compute(engine.manager, first, LENGTH)
    engine.manager.free(first)
    scheduler.add_request(engine.prompt("session", 13_000))
    assert nothing_kept(engine.manager), "the session has ended"
    assert engine.manager.get_computed_blocks(engine.prompt("a", 1000))[1] > 0
    assert engine.manager.get_computed_blocks(engine.prompt("b", 9000))[1] == 0
