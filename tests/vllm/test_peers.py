# SPDX-License-Identifier: Apache-2.0
"""One vLLM computes prompts, another one goes on: real managers, ranks and NIXL."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request, RequestStatus

from hybrid_plugin.config import PeerOptions
from hybrid_plugin.core.commands import Fetch, Offer, Pool, Withdraw
from hybrid_plugin.device.executor import Executor
from hybrid_plugin.engine.rank_peers import RankPeers, RanksWithPeers
from hybrid_plugin.engine.rank_tiers import RankTiers
from hybrid_plugin.tiers.failure import Reason
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.tiers.peers.params import OWN
from hybrid_plugin.vllm import patches, worker_tiers
from hybrid_plugin.vllm import peers as vllm_peers
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.reports import Report
from hybrid_plugin.vllm.scheduler import HybridScheduler
from tests.vllm.fakes import admit, compute, manager, nothing_kept, pools, request

NIXL = ("nixl", "nixl_cu12", "nixl_cu13")
pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in NIXL),
    reason="NIXL is not installed",
)

HOST = 1 << 20
LENGTH = 64
"""Tokens that one server computes of a prompt: four pages, and one token is left."""
PATIENCE = 60.0
IDENTITY = Identity("weights", "config", ("a0 full attention", "s0 state"), "float32")
PREFILL = {"do_remote_decode": True}


class Engine:
    """A manager and one rank, both real, and steps without a model between them."""

    def __init__(
        self, identity: Identity = IDENTITY, lease_seconds: float = 30.0
    ) -> None:
        self.manager = manager(
            clock=lambda: 100.0,
            host=HOST,
            pages=11,
            slots=5,
            host_memory=HOST,
            peers={},
        )
        config = pools(11, 5, HOST)
        memory = PoolMemory()
        memory.allocate(config, torch.device("cpu"), KVCacheLayout.LBNHC)
        backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
        layer = SimpleNamespace(get_attn_backend=lambda: backend)
        layouts = memory.layouts(config, {"a0": layer})
        assert config.host is not None
        host = memory.executor.attach_host(config.host)
        self.executor: Executor = memory.executor
        self.peers = RankPeers(
            host, PeerOptions(), identity, layouts, lease_seconds=lease_seconds
        )
        self.rank = RankTiers(self.executor, lambda own: own, peers=self.peers)
        ports = (self.peers.port,)
        self.ranks = RanksWithPeers(identity, "127.0.0.1", ports, f"{id(self)}")
        self.read_seconds = 0.1
        """That each fetch is said to take; computing takes a second for each token."""

    def open(self) -> Engine:
        """The worker's first answer."""
        self.manager.take_report(Report(0.0, 1.0, 1e9, peers=self.ranks))
        return self

    def step(self) -> list[Any]:
        """A step's commands, on the rank, and its report; nothing is computed."""
        commands = self.manager.drain_commands()
        self.executor.run(commands)
        outcomes = tuple(
            replace(one, seconds=self.read_seconds) for one in self.rank.settle()
        )
        self.manager.take_report(
            Report(0.0, 1.0, 1e9, weight_updates=self.rank.updates, outcomes=outcomes)
        )
        return commands

    def finish(self) -> list[Any]:
        """Steps for as long as they are of use."""
        commands, end = [], time.monotonic() + PATIENCE
        while self.manager.has_work:
            assert time.monotonic() < end, "the peer goes on"
            commands += self.step()
            time.sleep(0.001)
        return commands

    def prompt(self, name: str, first: int, **fields: Any) -> Any:
        """A request for one token more than is computed elsewhere."""
        return request(name, LENGTH + 1, first, **fields)

    def prefill(self, name: str, first: int, **fields: Any) -> Any:
        """Compute a prompt for another server; returns what that is told."""
        told = {**PREFILL, vllm_peers._LEFT: True}
        one = request(name, LENGTH, first, kv_transfer_params=told, **fields)
        one.num_prompt_tokens = LENGTH
        of = self.manager
        assert not of.must_wait(one)
        assert of.get_computed_blocks(one)[1] == 0
        assert admit(of, one, LENGTH) is not None
        self.step()
        sequence = of.cache.sequence(name)
        for page, token in enumerate(range(0, LENGTH, 16)):
            self.page(sequence.pages[page]).fill_(first + token + 1)
        self.slot(sequence.slot).fill_(first + LENGTH)
        compute(of, one, LENGTH)
        one.all_token_ids.append(7)
        of.free(one)
        return of.offer(one)

    def decode(self, name: str, first: int, params: Any, **fields: Any) -> int:
        """Go on with a prompt; returns what was restored."""
        one = self.prompt(name, first, kv_transfer_params=params, **fields)
        self.manager.arrives(one)
        return self.serve(one)

    def serve(self, one: Any) -> int:
        of, end = self.manager, time.monotonic() + PATIENCE
        of.step_begins()
        while of.must_wait(one):
            assert time.monotonic() < end, "it waits for ever"
            self.step()
            of.step_begins()
        _, hit, _ = of.get_computed_blocks(one)
        assert admit(of, one, LENGTH + 1 - hit) is not None
        self.step()
        sequence = of.cache.sequence(one.request_id)
        if hit:
            first = one.all_token_ids[0]
            for page, token in enumerate(range(0, LENGTH, 16)):
                row = self.page(sequence.pages[page])
                assert row.eq(first + token + 1).all(), "KV of something else"
            assert self.slot(sequence.slot).eq(first + LENGTH).all(), "another state"
        compute(of, one, LENGTH + 1)
        of.free(one)
        return int(hit)

    def page(self, index: int) -> torch.Tensor:
        (part,) = self.executor._arenas[Pool.KV].parts
        return part[index].view(torch.float32)

    def slot(self, index: int) -> torch.Tensor:
        (part,) = self.executor._arenas[Pool.STATE].parts
        return part[index].view(torch.float32)

    @property
    def tier(self) -> Any:
        (tier,) = self.manager.cache.lower_tiers.outer
        return tier

    def close(self) -> None:
        self.rank.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def begin(**fields: Any) -> Engine:
        started.append(Engine(**fields))
        return started[-1].open()

    yield begin
    for engine in started:
        engine.close()


def settled(engine: Engine) -> None:
    """Let the rank hear what became of its offers."""
    end = time.monotonic() + PATIENCE
    while engine.manager.cache.lower_tiers.offering:
        assert time.monotonic() < end
        engine.step()
        time.sleep(0.001)


def test_one_computes_and_the_other_goes_on(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    for first in (1000, 2000):
        params = one.prefill(f"p{first}", first)
        assert params["do_remote_prefill"] is True
        assert params["do_remote_decode"] is False
        assert params[OWN]["token_seconds"] == 1.0, "as its ranks report it"
        assert one.manager.has_work, "the rank is to hear of the offer"
        assert any(isinstance(command, Offer) for command in one.finish())
        assert other.decode(f"d{first}", first, params) == LENGTH
        other.finish()
        settled(one)
    assert nothing_kept(one.manager) and nothing_kept(other.manager)
    assert one.tier.stats.stores == 2 and other.tier.stats.loads == 2
    assert other.tier.stats.hit_tokens == 2 * LENGTH
    assert not one.tier.offers


def test_who_is_told_before_the_rank_waits_for_it(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    params = one.prefill("p", 1000)
    late = other.prompt("d", 1000, kv_transfer_params=params)
    other.manager.arrives(late)
    other.step()  # reads already
    time.sleep(0.05)
    one.finish()
    assert other.serve(late) == LENGTH


def test_what_is_there_is_not_fetched(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    other.prefill("own", 1000)
    other.finish()
    params = one.prefill("p", 1000)
    one.finish()
    assert other.decode("d", 1000, params) == LENGTH
    assert other.tier.stats.loads == 0


def test_several_requests_wait_for_one_fetch(start: Callable[..., Engine]) -> None:
    """As where one asks for several answers."""
    one, other = start(), start()
    params = one.prefill("p", 1000)
    one.finish()
    both = [other.prompt(n, 1000, kv_transfer_params=params) for n in ("d0", "d1")]
    for each in both:
        other.manager.arrives(each)
    assert [other.serve(each) for each in both] == [LENGTH, LENGTH]
    assert other.tier.stats.loads == 1 and not other.tier.stats.load_failures


def test_a_peer_is_read_from_where_that_is_faster_than_computing(
    start: Callable[..., Engine],
) -> None:
    """A slow one is tried again, when computing has taken as long as a read would."""
    one, other = start(), start()
    found = []
    for n, seconds in enumerate((2.5 * LENGTH, 1.0, 1.0, 1.0, 0.1 * LENGTH, 1.0)):
        other.read_seconds = seconds
        params = one.prefill(f"p{n}", 1000 * n)
        one.finish()
        found.append(other.decode(f"d{n}", 1000 * n, params))
        other.finish()
    assert found == [LENGTH, 0, 0, 0, LENGTH, LENGTH]
    assert other.tier.stats.loads == 3 and not other.tier.stats.load_failures


def ended(engine: Engine) -> dict[str, int]:
    """Why offers of a server that nobody read have ended, once all have."""
    settled(engine)
    return dict(engine.tier.stats.store_failures)


def test_an_offer_of_what_is_there_ends_at_once(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    other.prefill("own", 1000)
    other.finish()
    params = one.prefill("p", 1000)
    one.finish()
    assert other.decode("d", 1000, params) == LENGTH
    assert ended(one) == {Reason.DECLINED: 1} and nothing_kept(one.manager)
    assert one.tier.stats.stores == other.tier.stats.loads == 0


def test_an_offer_ends_where_computing_is_faster(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    other.read_seconds = 2.0 * LENGTH
    for n in range(2):
        params = one.prefill(f"p{n}", 1000 * n)
        one.finish()
        assert other.decode(f"d{n}", 1000 * n, params) == (0 if n else LENGTH)
    assert ended(one) == {Reason.DECLINED: 1} and one.tier.stats.stores == 1


def test_an_offer_ends_where_its_request_is_aborted(
    start: Callable[..., Engine],
) -> None:
    """Before anything was read of it: here, computing is faster."""
    one, other = start(), start()
    other.read_seconds = 2.0 * LENGTH
    params = one.prefill("first", 0)
    one.finish()
    assert other.decode("first", 0, params) == LENGTH
    params = one.prefill("p", 1000)
    one.finish()
    gone = other.prompt("d", 1000, kv_transfer_params=params)
    other.manager.arrives(gone)
    assert not other.manager.has_work
    other.manager.free(gone)
    assert other.manager.has_work, "the other server is to hear of it"
    other.finish()
    assert ended(one) == {Reason.DECLINED: 1}


def test_of_two_offers_of_one_prompt_one_is_read(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    both = [one.prefill("p0", 1000), one.manager.offer(one_more(one, 1000))]
    one.finish()
    for n, params in enumerate(both):
        late = other.prompt(f"d{n}", 1000, kv_transfer_params=params)
        other.manager.arrives(late)
        assert other.serve(late) == LENGTH
    assert ended(one) == {Reason.DECLINED: 1} and one.tier.stats.stores == 1


def one_more(engine: Engine, first: int) -> Any:
    """A request that has ended, for a prompt that another one left."""
    told = {**PREFILL, vllm_peers._LEFT: True}
    made = request("more", LENGTH, first, kv_transfer_params=told)
    made.num_prompt_tokens = LENGTH
    made.all_token_ids.append(7)
    return made


def test_requests_that_come_before_the_first_report_are_kept() -> None:
    one, other = Engine(), Engine()
    one.open()
    params = one.prefill("p", 1000)
    one.finish()
    early = other.prompt("d", 1000, kv_transfer_params=params)
    gone = other.prompt("gone", 1000, kv_transfer_params=params)
    early.over = False
    for each in (early, gone):
        other.manager.arrives(each)
    assert other.manager.is_opening and other.manager.must_wait(early)
    other.open()
    early.over = True
    assert other.serve(early) == LENGTH
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        (replace(IDENTITY, weights="others"), Reason.PEER_MODEL),
        (replace(IDENTITY, kv_dtype="bfloat16"), Reason.PEER_MODEL),
    ],
)
def test_what_another_model_computed_is_computed_anew(
    start: Callable[..., Engine],
    identity: Identity,
    reason: Reason,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = start(), start(identity=identity)
    with caplog.at_level(logging.WARNING, "vllm.hybrid_plugin"):
        for first in (1000, 2000):
            params = one.prefill(f"p{first}", first)
            one.finish()
            assert other.decode(f"d{first}", first, params) == 0
    told = [r.getMessage() for r in caplog.records if "computes a prompt" in r.msg]
    assert len(told) == 1 and reason in told[0]
    assert other.tier.stats.load_failures == {reason: 2}
    assert other.tier.stats.loads == 0


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        [],
        "do_remote_prefill",
        {"do_remote_prefill": "yes", OWN: {}},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, OWN: None},
        {"do_remote_prefill": True, OWN: {"format": "hybrid-peer/2"}},
        {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "h"},
    ],
    ids=str,
)
def test_what_a_client_makes_up_is_computed(
    start: Callable[..., Engine], params: Any
) -> None:
    assert start().decode("d", 1000, params) == 0


def test_a_prompt_that_differs_is_computed(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    params = one.prefill("p", 1000)
    one.finish()
    assert other.decode("d", 3000, params) == 0
    assert other.tier.stats.load_failures == {Reason.OTHER_TOKENS: 1}


def test_salts_stay_apart(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    params = one.prefill("p", 1000, cache_salt="mine")
    one.finish()
    assert other.decode("theirs", 1000, params, cache_salt="theirs") == 0
    assert other.decode("none", 1000, params) == 0
    assert other.decode("mine", 1000, params, cache_salt="mine") == LENGTH
    assert other.decode("none again", 1000, None) == 0


def test_a_peer_that_is_gone_costs_a_computation(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    params = one.prefill("p", 1000)
    one.finish()
    one.peers.stop()
    assert other.decode("d", 1000, params) == 0
    assert other.tier.stats.load_failures == {Reason.PEER_GONE: 1}
    assert nothing_kept(other.manager)


def test_an_offer_that_nobody_reads_ends(start: Callable[..., Engine]) -> None:
    one, other = start(lease_seconds=0.0), start()
    params = one.prefill("p", 1000)
    one.finish()
    settled(one)
    assert one.tier.stats.store_failures == {Reason.UNREAD: 1}
    assert nothing_kept(one.manager)
    assert other.decode("d", 1000, params) == 0
    assert other.tier.stats.load_failures == {Reason.LEASE_OVER: 1}


def test_a_flush_withdraws_what_is_offered(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    params = one.prefill("p", 1000)
    one.finish()
    assert one.manager.reset_prefix_cache() and one.manager.has_work
    assert any(isinstance(command, Withdraw) for command in one.finish())
    assert other.decode("d", 1000, params) == 0
    settled(one)


def test_updated_weights_are_offered_to_nobody(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    before = one.prefill("p", 1000)
    one.finish()
    one.rank.weights_changed()
    assert other.decode("d", 1000, before) == 0, "though its rows are as they were"
    one.step()
    assert one.prefill("q", 2000) is None
    params = other.prefill("r", 5000)
    other.finish()
    assert one.decode("s", 5000, params) == 0
    assert one.tier.stats.load_failures == {Reason.CLOSED: 1}


def test_a_request_that_is_aborted_leaves_nothing(start: Callable[..., Engine]) -> None:
    one, other = start(), start()
    params = one.prefill("p", 1000)
    one.finish()
    gone = other.prompt("d", 1000, kv_transfer_params=params)
    other.manager.arrives(gone)
    other.manager.free(gone)
    commands = other.finish()
    assert any(isinstance(command, Fetch) for command in commands)
    assert not other.tier._expected and nothing_kept(other.manager)
    assert other.decode("later", 1000, None) == LENGTH, "the host has it"
    settled(one)
    assert one.tier.stats.stores == 1, "what is being read is not declined"


def test_who_may_read_nothing_declines(start: Callable[..., Engine]) -> None:
    """As with `prompt_logprobs`: the offer would hold the host's rows until its end."""
    one, other = start(), start()
    params = one.prefill("p", 1000)
    one.finish()
    reader = other.prompt("d", 1000, kv_transfer_params=params)
    reader.skip_reading_prefix_cache = True
    other.manager.arrives(reader)
    other.finish()
    settled(one)
    assert one.tier.stats.store_failures.keys() == {Reason.DECLINED}
    assert nothing_kept(other.manager)


def test_nothing_is_offered_that_is_not_asked_for(start: Callable[..., Engine]) -> None:
    engine = start()
    assert engine.serve(request("one", LENGTH + 1, 1000)) == 0
    one = request("one", LENGTH + 1, 1000)
    for params in (None, {}, {"do_remote_decode": False}, 5):
        one.kv_transfer_params = params
        assert engine.manager.offer(one) is None
    one.kv_transfer_params, one.prompt_embeds = PREFILL, "embeddings"
    assert engine.manager.offer(one) is None
    one.prompt_embeds, one.skip_reading_prefix_cache = None, True
    assert engine.manager.offer(one) is None, "the other server would not read it"
    assert manager().offer(one) is None


# ------------------------------------------------------------ vLLM's own classes


def real_request(tokens: int = 10, **fields: Any) -> Request:
    """A request of vLLM, whose prompt is to be computed for another server."""
    extra = fields.pop("params", PREFILL)
    sampling = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": extra})
    ids = list(range(tokens))
    return Request(
        request_id="one",
        prompt_token_ids=ids,
        sampling_params=sampling,
        pooling_params=None,
        **fields,
    )


def test_the_last_token_is_left_to_the_next_server() -> None:
    one = real_request()
    held = one.prompt_token_ids
    vllm_peers.leave_last_token(one)
    assert one.prompt_token_ids == list(range(9)) == list(one.all_token_ids)
    assert (one.num_prompt_tokens, one.num_tokens, one.max_tokens) == (9, 9, 1)
    assert held == list(range(10)), "the front end has the whole prompt"
    assert vllm_peers.tokens_for_others(one) == 9
    assert PREFILL == {"do_remote_decode": True}


@pytest.mark.parametrize(
    "one",
    [
        real_request(params=None),
        real_request(params={"do_remote_prefill": True}),
        real_request(tokens=1),
        real_request(resumable=True),
    ],
)
def test_other_prompts_stay_whole(one: Request) -> None:
    before = list(one.all_token_ids)
    vllm_peers.leave_last_token(one)
    assert list(one.all_token_ids) == one.prompt_token_ids == before
    assert one.max_tokens == 5


def test_an_image_at_the_end_stays_whole() -> None:
    one = real_request()
    place = SimpleNamespace(offset=6, length=4)
    one.mm_features = [SimpleNamespace(identifier="i", mm_position=place)]
    vllm_peers.leave_last_token(one)
    assert one.num_prompt_tokens == 10
    assert vllm_peers.tokens_for_others(one) == 9
    place.length = 3
    vllm_peers.leave_last_token(one)
    assert one.num_prompt_tokens == 9


def test_an_answer_says_where_its_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler: Any = HybridScheduler.__new__(HybridScheduler)
    offered: list[Any] = [{"here": 1}]
    scheduler.kv_cache_manager = SimpleNamespace(
        offer=lambda _: offered[0], hit_checking=None
    )
    monkeypatch.setattr(
        Scheduler, "_free_request", lambda self, request, **_: (None, "encoder's")
    )
    one = real_request()
    for status, peers, found in (
        (RequestStatus.FINISHED_LENGTH_CAPPED, True, {"here": 1}),
        (RequestStatus.FINISHED_STOPPED, True, {"here": 1}),
        (RequestStatus.FINISHED_ABORTED, True, None),
        (RequestStatus.FINISHED_LENGTH_CAPPED, False, None),
    ):
        one.status, scheduler._has_peers = status, peers
        freed = scheduler._free_request(one, delay_free_blocks=False)
        assert freed == (found, "encoder's")
    scheduler._has_peers, offered[0] = True, None
    one.status = RequestStatus.FINISHED_STOPPED
    assert scheduler._free_request(one) == (None, "encoder's")


def test_a_request_is_queued_shortened_and_then_fetched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler: Any = HybridScheduler.__new__(HybridScheduler)
    seen: list[Any] = []
    scheduler.kv_cache_manager = SimpleNamespace(
        arrives=lambda one: seen.append(("arrives", one.num_tokens))
    )
    monkeypatch.setattr(
        Scheduler, "add_request", lambda _, one: seen.append(("queued", one.num_tokens))
    )
    for has_peers, expected in (
        (False, [("queued", 10)]),
        (True, [("queued", 9), ("arrives", 9)]),
    ):
        seen.clear()
        scheduler._has_peers, scheduler._has_store = has_peers, False
        scheduler.requests = {}
        scheduler.add_request(real_request())
        assert seen == expected


def test_the_log_says_nothing_of_connectors(caplog: pytest.LogCaptureFixture) -> None:
    core = logging.getLogger("vllm.v1.engine.core")
    before = list(core.filters)
    try:
        patches.patch_connector_warning()
        patches.patch_connector_warning()
        assert len(core.filters) == len(before) + 1
        made = core.makeRecord
        for text, passes in (
            ("Got kv_transfer_params, but no KVConnector found. Disabling", False),
            ("Got ec_transfer_params, but no ECConnector found. Disabling", True),
        ):
            record = made("n", logging.WARNING, "f", 1, text, (), None)
            assert bool(core.filter(record)) is passes
    finally:
        core.filters[:] = before


def test_ranks_tell_each_other_where_they_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    engine.close()
    group = SimpleNamespace(rank_in_group=1, world_size=2, cpu_group="group")

    def gather(found: list[Any], own: Any, group: str) -> None:
        found[:] = [(7600, "mark of 0"), own]

    identity = replace(IDENTITY, tensor_rank=1, tensor_ranks=2)
    monkeypatch.setattr(worker_tiers, "get_tp_group", lambda: group)
    monkeypatch.setattr(worker_tiers, "identity_of", lambda *_: identity)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    nothing: Any = None
    options: Any = SimpleNamespace(disk=None, peers=PeerOptions(), store=None)
    layouts = engine.peers.source.introduction.layouts
    tiers, ranks = worker_tiers.attach(
        engine.executor, nothing, nothing, options, layouts
    )
    assert ranks.disk is None and ranks.peers is not None
    assert ranks.peers.ports[0] == 7600 and ranks.peers.ports[1] > 0
    assert (ranks.peers.mark, ranks.peers.host) == ("mark of 0", "127.0.0.1")
    tiers.close()
