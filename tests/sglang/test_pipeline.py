# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline: equal ids in each one's memory; batches that take turns."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.runtime_context import get_context

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Copy, Pool, Zero
from hybrid_plugin.engine import untried
from hybrid_plugin.sglang import cache_kinds, pipeline, planning
from hybrid_plugin.sglang.clock import RankClock
from hybrid_plugin.sglang.parking import park_paused
from hybrid_plugin.sglang.pipeline import StageLayers
from hybrid_plugin.sglang.pool_memory import PoolMemory
from hybrid_plugin.sglang.scheduling import more_rows
from hybrid_plugin.sglang.slots import SlotMajorPool, slot_bytes, state_views
from tests.sglang.fakes import Bench, pausing
from tests.sglang.test_planning import (
    LAYERS,
    MIB,
    PAGE,
    STATE_BYTES,
    TOKEN_BYTES,
    Running,
    needs_returned_memory,
    no_registry,
)
from tests.sglang.test_slots import params

__all__ = ["no_registry"]
LAYER_BYTES = TOKEN_BYTES // LAYERS


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


# ------------------------------------------------------------- dividing the memory


def stage(monkeypatch: pytest.MonkeyPatch, first: int, end: int) -> Running:
    """One of two stages of the model of `test_planning`: layers `first` to `end`.

    States are in its layers 0, 2 and 4, KV in 1 and 3.
    """
    running: Any = Running(monkeypatch)
    running.layer_info = SimpleNamespace(start_layer=first, end_layer=end)
    parallel = SimpleNamespace(
        pp_size=2, launch_world_size=2, world_group=SimpleNamespace(cpu_group=None)
    )
    for module in (planning, pipeline):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)

    def gather(found: list[Any], own: StageLayers, group: Any) -> None:
        layers = [(0, first), (first, end)] if first else [(first, end), (end, 5)]
        found[:] = [
            StageLayers(
                tuple(n for n in (1, 3) if a <= n < b),
                tuple(n for n in (0, 2, 4) if a <= n < b),
            )
            for a, b in layers
        ]
        assert own == found[first > 0]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    kv = SimpleNamespace(
        _cell_size=LAYER_BYTES * sum(first <= n < end for n in (1, 3)),
        _compute_cell_size=lambda _, layers: LAYER_BYTES * layers,
    )
    monkeypatch.setattr(planning, "create_memory_pool_configurator", lambda _: kv)
    found: Running = running
    return found


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_stages_have_equally_many_ids_in_the_memory_of_each(
    monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """As many as fit beside the most layers of each kind; a stage may have none."""
    sizes = []
    for first, end in ((0, cut), (cut, 5)):
        with monkeypatch.context() as patched:
            running = stage(patched, first, end)
            sizes.append(running.reserve(MIB))
            assert running.memory.shared is None
    assert sizes[0] == sizes[1]
    pages = max(sum(n < cut for n in (1, 3)), sum(n >= cut for n in (1, 3)))
    states = max(sum(n < cut for n in (0, 2, 4)), sum(n >= cut for n in (0, 2, 4)))
    row = pages * LAYER_BYTES * PAGE
    spent = sizes[0].pages * row + sizes[0].slots * states * STATE_BYTES
    assert MIB - row < spent <= MIB


def test_elastic_pools_need_stages_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="SGLANG_PP_LAYER_PARTITION"):
        stage(monkeypatch, 0, 3).reserve(4 * MIB, elastic=True)


@needs_returned_memory
def test_elastic_pools_of_stages_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = []
    alike = [StageLayers((1,), (0,)), StageLayers((3,), (2,))]
    for first, end in ((0, 2), (2, 4)):
        with monkeypatch.context() as patched:
            running = stage(patched, first, end)
            running.model_config.states.mamba2_cache_params.layers = [0, 2]
            running.model_config.states.mamba2_cache_params.mamba_cache_per_req = (
                2 * STATE_BYTES
            )
            patched.setattr(
                torch.distributed,
                "all_gather_object",
                lambda found, *_: found.__setitem__(slice(None), alike),
            )
            running.reserve(4 * MIB, elastic=True)
            plan = running.memory.plan
            assert plan is not None and running.memory.shared is not None
            plans.append((plan.layout, plan.sizes, plan.shared))
    assert plans[0] == plans[1]
    assert [len(group.layers) for group in plans[0][0].states] == [1]


def test_a_stage_without_some_kind_of_layer_runs_commands_about_it() -> None:
    kept = SimpleNamespace(
        conv=[torch.zeros(0, 5, 3, 2)],
        temporal=torch.zeros(0, 5, 4),
        intermediate_ssm=None,
        intermediate_conv_window=None,
    )
    states = SimpleNamespace(mamba_cache=kept, _slot_siblings=(), size=4)
    kv = type("MHATokenToKVPool", (), {"k_buffer": (), "v_buffer": ()})()
    pools = SimpleNamespace(full_kv_pool=kv, size=6 * PAGE)
    executor = PoolMemory().executor(pools, states, PAGE)
    executor.run([Copy(Pool.KV, 1, 6), Copy(Pool.STATE, 1, 4), Zero(Pool.STATE, 4)])
    parts = executor.parts()
    assert parts[Pool.KV][0].shape == (7, 0)
    assert parts[Pool.STATE][0].shape == (5, 0)


def test_slots_hold_the_layers_of_their_stage() -> None:
    model = params((5, 3), (7, 3))
    share = slot_bytes(model) // len(model.layers)
    rows = torch.zeros(4, 2 * share, dtype=torch.int8)
    pool = SlotMajorPool(
        rows,
        size=3,
        spec_state_size=0,
        cache_params=model,
        mamba_layer_ids=model.layers[1:3],
        device="cpu",
    )
    kept = [*pool.mamba_cache.conv, pool.mamba_cache.temporal]
    assert {len(state) for state in kept} == {2}
    for state in kept:
        state.fill_(1)
    for view in state_views(rows, model, 2):
        assert bool((view == 1).all())


# ------------------------------------------------------------------ several batches


class Batches:
    """The batches of a pipeline's stages, which take turns as in `event_loop_pp`."""

    def __init__(self, bench: Bench, count: int = 2) -> None:
        self.bench = bench
        scheduler = bench.scheduler
        kind = type(scheduler.running_batch)
        self.running = [kind([], bench.rows) for _ in range(count)]
        self.last: list[Any] = [None] * count

    def turn(self, batch: int, chunk: int | None = None) -> list[str]:
        """Schedule and launch one of them; returns the ids of what ran."""
        scheduler = self.bench.scheduler
        scheduler.running_batch = self.running[batch]
        scheduler.last_batch = self.last[batch]
        ran = self.bench.step(chunk)
        self.last[batch] = scheduler.last_batch
        return ran


def test_a_request_that_pauses_goes_on_when_its_own_batch_is_done() -> None:
    """Others are launched between."""
    bench = Bench()
    batches = Batches(bench)
    bench.queue(pausing("first", range(20), at=8))
    assert batches.turn(0) == ["first"]
    bench.queue(pausing("second", range(100, 120), at=12))
    assert batches.turn(1) == ["second"], "the first one's chunk is under way"
    assert batches.turn(0) == ["first"]
    assert batches.turn(1) == ["second"]
    ends = [req.extend_end for req in bench.cache._requests.values()]
    assert ends == [20, 20]
    assert bench.cache._paused == []


def test_another_batch_may_go_on_with_what_paused_in_one() -> None:
    bench = Bench()
    batches = Batches(bench)
    bench.queue(pausing("long", range(40), at=8))
    assert batches.turn(0) == ["long"]
    assert batches.turn(1) == []
    scheduler = bench.scheduler
    scheduler.running_batch, scheduler.last_batch = batches.running[0], batches.last[0]
    park(bench)
    assert batches.turn(1) == ["long"]
    assert batches.turn(0) == [], "its own batch has it no more"
    assert bench.core.live == 1


def park(bench: Bench) -> None:
    """As at the beginning of a turn in which nothing is admitted."""
    running: Any = bench.scheduler.running_batch
    park_paused(bench.scheduler, running, bench.scheduler.last_batch)


def test_what_ends_while_its_chunk_runs_is_forgotten() -> None:
    bench = Bench()
    batches = Batches(bench)
    req = pausing("gone", range(20), at=8)
    bench.queue(req)
    assert batches.turn(0) == ["gone"]
    assert batches.turn(1) == []
    bench.finish(req)
    assert bench.cache._paused == []
    assert batches.turn(0) == []
    bench.assert_idle()


def test_parked_requests_take_no_more_than_the_places_of_a_batch() -> None:
    bench = Bench(rows=4)
    bench.park(pausing("parked", range(20), at=8))
    assert more_rows(3, bench.cache.num_parked, 9) == 4
    assert more_rows(2, bench.cache.num_parked, 2) == 2


# ------------------------------------------------------------------------- the time


def test_every_stage_has_the_time_of_the_first() -> None:
    """What a stage receives, and the time, goes on to the next one."""
    own = [100.0, 7.0, 90000.0]
    clocks = [RankClock(lambda stage=stage: own[stage]) for stage in range(3)]
    for clock, measured in zip(clocks, (0.5, 0.1, 0.2), strict=True):
        clock.measured = lambda measured=measured: measured

    def broadcast(requests: list[Any], local: list[Any]) -> list[Any]:
        return [*requests, *local]

    def step(requests: list[Any]) -> list[list[Any]]:
        got = []
        for number, clock in enumerate(clocks):
            received = clock.broadcast(broadcast, requests, [], first_stage=number == 0)
            got.append(received)
            requests = pickle.loads(pickle.dumps(clock.relayed(received)))
        return got

    assert step(["a"]) == [["a"]] * 3
    assert [clock() for clock in clocks] == [100.0] * 3
    assert [clock.token_seconds for clock in clocks] == [0.5] * 3
    own[:] = [100.25, 50.0, 1.0]
    assert step([]) == [[]] * 3, "within the resolution nothing is sent"
    assert [clock() for clock in clocks] == [100.0] * 3
    own[0] = 102.0
    assert step(["b", "c"]) == [["b", "c"]] * 3
    assert [clock() for clock in clocks] == [102.0] * 3


# --------------------------------------------------------------- what is not served


def view(**flags: Any) -> Any:
    served = {
        "pp_size": 2,
        "device": "cpu",
        "speculative_algorithm": None,
        "dp_size": 1,
        "attn_dp_size": None,
    }
    return SimpleNamespace(**served | flags)


@pytest.fixture
def no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layers keep KV and states, and nothing beside them."""
    for kind in ("has_index_keys", "has_compressed_keys", "has_side_states"):
        monkeypatch.setattr(cache_kinds, kind, lambda _: False)
    monkeypatch.setattr(cache_kinds, "mambaish_config", lambda _: None)


@pytest.mark.parametrize(
    ("flags", "options", "windows", "sentence"),
    [
        ({}, {}, False, None),
        ({"pp_size": 1, "device": "cuda"}, {"host_memory": 1 << 20}, True, None),
        (
            {"device": "cuda"},
            {},
            False,
            "pipeline parallelism is served on CPUs only; use tensor parallelism.",
        ),
        ({"speculative_algorithm": "NGRAM"}, {}, False, "drafts are not served with"),
        ({}, {}, True, "attention windows are not served with pipeline"),
        ({"dp_size": 2}, {}, False, "data parallelism was not tested with pipeline"),
        ({}, {"deterministic": "prefix"}, False, "deterministic was not tested with"),
        ({}, {"host_memory": 1 << 20}, False, "host_memory is not served with"),
        ({}, {"verify_fraction": 0.5}, False, "verify_fraction is not served with"),
    ],
)
def test_what_is_not_served_in_stages(
    flags: dict[str, Any],
    options: dict[str, Any],
    windows: bool,
    sentence: str | None,
    no_kind: None,
) -> None:
    found = list(
        pipeline.obstacles(
            view(**flags), HybridConfig.from_mapping(options), None, windows=windows
        )
    )
    if sentence is None:
        assert found == []
    else:
        (only,) = found
        assert only.startswith(sentence)


def test_stages_on_gpus_can_be_tried(
    no_kind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(untried.TRIED, untried.STAGES)
    on_gpu, options = view(device="cuda"), HybridConfig()
    assert list(pipeline.obstacles(on_gpu, options, None, windows=False)) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("has_index_keys", "index keys"),
        ("has_compressed_keys", "compressed keys"),
        ("has_side_states", "states of n-grams"),
    ],
)
def test_what_layers_keep_beside_is_not_served_in_stages(
    kind: str, name: str, no_kind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_kinds, kind, lambda _: True)
    (found,) = pipeline.obstacles(view(), HybridConfig(), None, windows=False)
    assert found == (
        f"{name} are not served with pipeline parallelism yet; drop --pp-size."
    )
