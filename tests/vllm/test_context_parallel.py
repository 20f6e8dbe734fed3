# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: a page has rows on every rank, and tokens of all."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Copy, Pool
from hybrid_plugin.engine import untried
from hybrid_plugin.vllm import context_parallel, lone_rank, page_size, planning
from hybrid_plugin.vllm.kernels import prefill_graphs
from hybrid_plugin.vllm.manager import HybridKVCacheManager
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.pool_memory import PoolMemory
from hybrid_plugin.vllm.servable import UnservableError
from hybrid_plugin.vllm.specs import tokens_in_page
from tests.vllm.fakes import Tokens, compute, ids, request
from tests.vllm.test_planning import PAGE_BYTES, SLOT_BYTES, SPECS, STATE, config_of

ROWS = 16


def planned(
    page_ranks: int, specs: dict[str, KVCacheSpec] = SPECS, **options: Any
) -> HybridKVCacheConfig:
    """Pools of a rank of several, of 28 pages and 20 slots."""
    memory = 28 * PAGE_BYTES + 20 * SLOT_BYTES
    ratio = 20 * SLOT_BYTES / memory
    options.setdefault("state_memory_ratio", ratio)
    config = config_of(400, page_ranks=page_ranks, **options)
    found = planning.plan(config, [specs] * page_ranks, [memory] * page_ranks)
    assert all(one == found[0] for one in found)
    assert isinstance(found[0], HybridKVCacheConfig)
    return found[0]


# ------------------------------------------------------------------ geometry


def test_a_page_holds_the_tokens_of_all_ranks_in_the_memory_of_one() -> None:
    alone, two = planned(1), planned(2)
    assert (two.page_size, alone.page_size) == (32, 16)
    assert two.plan.layout.page_bytes == alone.plan.layout.page_bytes == PAGE_BYTES
    assert (two.pages, two.slots) == (alone.pages, alone.slots)
    config = config_of(400, page_ranks=2)
    assert planning.capacity(config, two)[0] == 2 * planning.capacity(config, alone)[0]
    (attention, states) = two.kv_cache_groups
    assert attention.kv_cache_spec.block_size == ROWS, "as vLLM's workers count"
    assert tokens_in_page(attention.kv_cache_spec) == 32
    assert tokens_in_page(states.kv_cache_spec) == states.kv_cache_spec.block_size


def test_the_longest_sequence_needs_a_share_of_its_pages_on_each_rank() -> None:
    pages = [planned(ranks).plan.layout.pages_for(400) for ranks in (1, 2, 4)]
    assert pages == [25, 13, 7]
    fitting = (13 + 1) * PAGE_BYTES + 2 * SLOT_BYTES
    two = config_of(400, page_ranks=2)
    (found, _) = planning.plan(two, [SPECS] * 2, [fitting] * 2)
    assert isinstance(found, HybridKVCacheConfig) and found.pages == 14
    with pytest.raises(ConfigError, match="cannot hold one sequence of 400 tokens"):
        planning.plan(config_of(400), [SPECS], [fitting])


def test_tables_of_workers_are_as_wide_as_the_pages_of_the_longest_sequence() -> None:
    spec = planned(2).kv_cache_groups[0].kv_cache_spec
    config: Any = config_of(400, page_ranks=2)
    assert spec.max_num_blocks_per_req(config, 400) == 13


def test_elastic_pools_have_pages_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.elastic, "block_bytes", lambda config: 4096)
    monkeypatch.setattr(
        "hybrid_plugin.engine.elastic_memory.obstacle", lambda device: None
    )
    config = config_of(400, page_ranks=2, elastic=True)
    (found, _) = planning.plan(config, [SPECS] * 2, [1 << 20] * 2)
    assert isinstance(found, HybridKVCacheConfig) and found.shared is not None
    layout = found.plan.layout
    assert (layout.page_size, layout.page_bytes) == (32, PAGE_BYTES)


def test_warm_up_hands_out_pages_by_the_rows_of_a_rank() -> None:
    """As vLLM's counts them: 6 tokens are a page for as few rows, too."""
    few = {"a0": _attention(4), "s0": STATE}
    groups = planning.make_groups(few, 2)
    limits = planning.limits_of(config_of(page_ranks=2), groups)
    assert limits.warm_up_ids == 1 + 2 + 1


def test_what_vllm_asks_of_groups_is_in_tokens() -> None:
    of = manager_of(planned(2))
    assert [one.block_size for one in of.coordinator.single_type_managers] == [
        32,
        STATE.block_size,
    ]
    one = request("a", 70)
    _, hit, _ = of.get_computed_blocks(one)
    pages, _ = ids(of.allocate_slots(one, 70, hit))
    assert len(pages) == 3
    assert [len(some) for some in of.get_block_ids_for_computed_tokens("a", 33)] == [
        2,
        1,
    ]


# -------------------------------------------------------- what is not served


def test_windows_are_told_to_do_without() -> None:
    window = SlidingWindowSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float32,
        sliding_window=64,
    )
    specs = SPECS | {"w0": window}
    assert len(planning.make_groups(specs)) == 3
    with pytest.raises(UnservableError, match=r"layer w0, .*drop --decode-context"):
        planning.make_groups(specs, 2)


def test_layers_that_every_rank_has_whole_do_not_share_its_pages() -> None:
    whole = FullAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float32,
        dcp_sharded=False,
    )
    with pytest.raises(UnservableError, match="agree on one page size"):
        planning.make_groups(SPECS | {"a1": whole}, 2)


def sentences(
    options: HybridConfig | None = None, *, drafts: Any = None, **ranks: int
) -> list[str]:
    parallel = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    } | ranks
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), speculative_config=drafts
    )
    return list(context_parallel.obstacles(config, options or HybridConfig()))


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform", gpu)
    monkeypatch.setenv(untried.TRIED, untried.CONTEXT)


UNTRIED = (
    "decode context parallelism is not supported yet; drop "
    "--decode-context-parallel-size."
)
DEALT = {"decode_context_parallel_size": 2}


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("options", "drafts", "expected"),
    [
        ({}, None, []),
        ({"host_memory": 1 << 20}, None, []),
        ({"verify_fraction": 0.5}, None, []),
        (
            {},
            object(),
            [
                "drafts are not served with decode context parallelism yet; drop "
                "--speculative-config."
            ],
        ),
        (
            {"deterministic": "prefix"},
            None,
            [
                "deterministic is not promised with decode context parallelism, which "
                "adds up what is cached and what is new apart; leave one of them out."
            ],
        ),
        (
            {"host_memory": 1 << 20, "peers": {}},
            None,
            [
                "peers is not served with decode context parallelism yet, whose ranks "
                "have every other token of a page; leave one of them out."
            ],
        ),
    ],
)
def test_what_is_not_served_beside_it(
    options: dict[str, Any], drafts: Any, expected: list[str]
) -> None:
    given = HybridConfig.from_mapping(options)
    assert sentences(given, drafts=drafts, **DEALT) == expected
    assert sentences(given, drafts=drafts) == []


@pytest.mark.usefixtures("_gpu")
def test_prefills_are_not_divided_among_ranks() -> None:
    assert sentences(prefill_context_parallel_size=2) == [
        "prefill context parallelism is not supported yet; drop "
        "--prefill-context-parallel-size."
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_attention_on_cpus_has_it_not() -> None:
    assert sentences(**DEALT) == [
        UNTRIED,
        "vLLM's attention on CPUs has no decode context parallelism; drop "
        "--decode-context-parallel-size.",
    ]


def test_prefills_replay_no_graphs_beside_it() -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, **DEALT),
        use_v2_model_runner=True,
        model_config=SimpleNamespace(is_moe=False, multimodal_config=None),
    )
    layers: Any = SimpleNamespace(
        drafts=0, is_whole=True, mixers=frozenset(), uncaptured=None
    )
    (found,) = prefill_graphs.obstacles(config, layers, "cuda")
    assert "decode context parallelism" in found
    assert prefill_graphs.are_wanted(None, config, layers, "cuda") is False
    with pytest.raises(ConfigError, match="decode context parallelism"):
        prefill_graphs.are_wanted(True, config, layers, "cuda")


def test_a_rank_without_peers_makes_nothing_that_meets_them() -> None:
    """`hybrid-plugin doctor` makes layers alone; others make it as before."""
    from vllm.v1.attention.ops.dcp import MLADCPManager

    with lone_rank._without_exchanges(config_of(page_ranks=2)):
        MLADCPManager(peers=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        MLADCPManager(peers=None)  # type: ignore[call-arg]


# ----------------------------------------------------------------- page size


def engine_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    ranks: int = 2,
    turn: int = 1,
    block_size: int | None = None,
    **options: Any,
) -> Any:
    """An engine whose attention takes multiples of 16 rows."""
    backend = SimpleNamespace(
        get_name=lambda: "FLASH_ATTN", supports_block_size=lambda size: not size % 16
    )
    platform = SimpleNamespace(_find_non_ssm_backends=lambda config: [backend])
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setattr(
        "vllm.config.vllm.set_current_vllm_config", lambda config: _Nothing()
    )
    return SimpleNamespace(
        additional_config={"hybrid_plugin": options},
        cache_config=SimpleNamespace(
            block_size=block_size, user_specified_block_size=block_size is not None
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=turn
        ),
    )


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, 16),
        ({"ranks": 1}, 16),
        ({"ranks": 8}, 16),
        ({"page_size": 64}, 32),
        ({"page_size": 64, "ranks": 4}, 16),
        ({"block_size": 48}, 48),
        ({"block_size": 32, "page_size": 64}, 32),
        ({"turn": 32}, 32),
        ({"turn": 32, "ranks": 1}, 16),
    ],
)
def test_a_rank_has_its_share_of_a_page_in_rows(
    given: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_of(monkeypatch, **given)
    for _ in range(2):  # vLLM's platform and the worker both ask
        page_size.choose(config)
        assert config.cache_config.block_size == rows


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"page_size": 48}, "Page size 48 does not suit .* which takes 32, 64, 96"),
        ({"block_size": 8}, "Page size 16 does not suit"),
        ({"block_size": 16, "turn": 32}, "Page size 32 does not suit .* takes 64"),
        (
            {"block_size": 16, "page_size": 16},
            "--block-size 16 on 2 ranks, which makes pages of 32 and the option "
            "page_size 16 contradict each other",
        ),
    ],
)
def test_pages_that_ranks_cannot_share_out_are_refused(
    given: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        page_size.choose(engine_of(monkeypatch, **given))


# ------------------------------------------------- what ranks find in their pages


def manager_of(config: HybridKVCacheConfig, **options: Any) -> HybridKVCacheManager:
    return HybridKVCacheManager(
        config,
        HybridConfig.from_mapping(options),
        watermark=0.0,
        log_stats=True,
        clock=lambda: 0.0,
        max_model_len=400,
    )


def _attention(rows: int, heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=rows, num_kv_heads=heads, head_size=8, dtype=torch.float32
    )


class Rank:
    """Memory of one rank, into which passes write what they find out of tokens."""

    def __init__(
        self, config: HybridKVCacheConfig, rank: int, ranks: int, turn: int
    ) -> None:
        self._memory = PoolMemory()
        views = self._memory.allocate(config, torch.device("cpu"), KVCacheLayout.LBHNC)
        self._kv, self._states = views["a0"], views["s0"]
        self._rows = config.kv_cache_groups[0].kv_cache_spec.block_size
        self._rank, self._ranks, self._turn = rank, ranks, turn

    def run(self, commands: Sequence[Any]) -> None:
        """A step's commands."""
        self._memory.executor.run(list(commands))

    def place(self, position: int) -> tuple[int, int] | None:
        """Column of a table and row of a page, by vLLM's rule; None elsewhere."""
        column, within = divmod(position, self._rows * self._ranks)
        turns, in_turn = divmod(within, self._turn)
        if turns % self._ranks != self._rank:
            return None
        return column, turns // self._ranks * self._turn + in_turn

    def write(self, tokens: Sequence[int], start: int, table: list[int]) -> None:
        """What attention layers keep of tokens from a position on."""
        for position in range(start, len(tokens)):
            place = self.place(position)
            if place is not None:
                column, row = place
                self._kv[table[column], :, row] = _value(tokens, position)

    def check(self, tokens: Sequence[int], table: list[int]) -> None:
        """What attention layers read of these tokens is theirs."""
        places = {n: self.place(n) for n in range(len(tokens))}
        held = [(n, table[at[0]], at[1]) for n, at in places.items() if at is not None]
        if not held:
            return
        positions, pages, rows = zip(*held, strict=True)
        # All at once: a look at each would take most of the test's time.
        found = self._kv[list(pages), :, list(rows)].flatten(1)
        expected = torch.tensor([_value(tokens, n) for n in positions])[:, None]
        wrong = (found != expected).any(1).nonzero().flatten().tolist()
        assert not wrong, [positions[n] for n in wrong]

    def write_state(self, tokens: Sequence[int], slot: int) -> None:
        """The state behind tokens."""
        self._states[slot] = _state(tokens)

    def check_state(self, tokens: Sequence[int], slot: int) -> None:
        """It is the one in a slot."""
        assert bool((self._states[slot] == _state(tokens)).all()), len(tokens)


def _value(tokens: Sequence[int], position: int) -> int:
    return (tokens[position] * 7 + position * 13) % 253 - 126


def _state(tokens: Sequence[int]) -> int:
    """Of one byte; zeros before the first token."""
    return zlib.crc32(bytes(tokens)) % 253 - 126 if tokens else 0


class Engine:
    """A scheduler's manager and its ranks: one request at a time."""

    def __init__(self, ranks: int, turn: int, heads: int) -> None:
        specs: dict[str, KVCacheSpec] = {
            "a0": _attention(32 // ranks, heads),
            "s0": MambaSpec(block_size=1024, shapes=((256,),), dtypes=(torch.float32,)),
        }
        config_for = config_of(400, page_ranks=ranks)
        sizes = planning.PoolSizes(pages=40, slots=12)
        groups = planning.make_groups(specs, ranks)
        config = planning.make_config(config_for, groups, sizes)
        self.manager = manager_of(config)
        self.ranks = [Rank(config, rank, ranks, turn) for rank in range(ranks)]
        self.copies = 0

    def ask(self, name: str, prompt: list[int], answer: list[int]) -> int:
        """Answer a prompt with these tokens; returns how many were restored."""
        one = request(name, 0)
        one.all_token_ids = Tokens(prompt)
        one.num_prompt_tokens = len(prompt)
        _, hit, _ = self.manager.get_computed_blocks(one)
        self._pass(one, hit, hit, is_new=True)
        while one.num_computed_tokens < len(prompt):
            self._pass(one, one.num_computed_tokens, 0)
        for token in answer[:-1]:
            one.all_token_ids.append(token)
            self._pass(one, one.num_computed_tokens, 0)
        one.all_token_ids.append(answer[-1])
        self.manager.free(one)
        return hit

    def _pass(self, one: Any, start: int, hit: int, *, is_new: bool = False) -> None:
        """One pass over what is known, up to the next snapshot."""
        tokens = list(one.all_token_ids)
        end = self.manager.chunk_end(one, start, min(len(tokens), start + 64))
        given = self.manager.allocate_slots(one, end - start, hit)
        assert given is not None
        self.manager.cross([one])
        commands = self.manager.drain_commands()
        self.copies += sum(
            isinstance(one, Copy) and one.pool == Pool.KV for one in commands
        )
        table, (slot,) = self.manager.get_block_ids(one.request_id)
        for rank in self.ranks:
            rank.run(commands)
            rank.check(tokens[:start], table)
            rank.check_state(tokens[:start], slot)
            rank.write(tokens[:end], start, table)
            rank.write_state(tokens[:end], slot)
        compute(self.manager, one, end)


def conversations(engine: Engine, seed: int) -> list[int]:
    """Chats of several turns that evict one another, and others that leave them."""
    chance = random.Random(seed)
    histories: list[list[int]] = []
    hits: list[int] = []

    def more(least: int, most: int) -> list[int]:
        return [chance.randrange(1, 250) for _ in range(chance.randint(least, most))]

    for turn in range(40):
        kind = chance.random()
        if not histories or kind < 0.15:
            begun: list[int] = []
        elif kind < 0.35:
            whole = chance.choice(histories)
            begun = whole[: chance.randint(1, len(whole))]
        else:
            begun = histories.pop(chance.randrange(len(histories)))
        prompt, answer = begun + more(1, 70), more(1, 30)
        if len(prompt) + len(answer) > 390:
            continue
        hits.append(engine.ask(f"{turn}", prompt, answer))
        histories.append(prompt + answer)
    return hits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "turn"), [(2, 1), (2, 8), (4, 4)])
def test_every_rank_restores_its_share_wherever_a_hit_ends(
    ranks: int, turn: int, seed: int
) -> None:
    """The hits are those of one rank with pages of as many tokens, and bytes."""
    divided, alone = Engine(ranks, turn, heads=4), Engine(1, 1, heads=4 // ranks)
    hits = conversations(divided, seed)
    assert hits == conversations(alone, seed)
    assert sum(hit > 0 for hit in hits) > 10
    assert any(hit % 32 for hit in hits), "within a page"
    assert any(hit % ranks for hit in hits), "where ranks have unequal shares"
    assert divided.copies > 5
