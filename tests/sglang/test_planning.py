# SPDX-License-Identifier: Apache-2.0
"""What SGLang's model and arguments come to: layout, limits, pages and slots."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.runtime_context import get_context

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.core.commands import Copy, Pool
from hybrid_plugin.core.memory.layout import CacheLayout, PoolSizes
from hybrid_plugin.device import host_arena
from hybrid_plugin.sglang import addressing, elastic, layout, pipeline, planning
from hybrid_plugin.sglang.pool_memory import PoolMemory
from hybrid_plugin.sglang.speculation import draft_pages, scratch_layout

LAYERS, PAGE, LONGEST = 2, 16, 512
TOKEN_BYTES = LAYERS * 2 * 3 * 8 * 2
"""Keys and values in two layers, 3 heads with 8 numbers of two bytes."""
STATE_BYTES = (10 * 3 + 2) * 2 + 4 * 4 * 8 * 4
"""Two convolutions in bfloat16, a temporal state in float32."""
MIB = 1 << 20

needs_returned_memory = pytest.mark.skipif(
    not host_arena.is_available(), reason="needs memory that can be returned"
)


def model(arch: AttentionArch = AttentionArch.MHA) -> Any:
    """As much of SGLang's `ModelConfig` as is read, with the states beside it."""
    params = SimpleNamespace(
        shape=SimpleNamespace(
            conv=[(10, 3), (2,)],
            temporal=(4, 4, 8),
            conv_kernel=4,
            disable_conv_window_dedup=False,
        ),
        is_kda=False,
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
        layers=[0, 2, 4],
        mamba_cache_per_req=3 * STATE_BYTES,
    )
    states = SimpleNamespace(
        mamba2_cache_params=params, full_attention_layer_ids=[1, 3]
    )
    return SimpleNamespace(
        attention_arch=arch,
        context_len=LONGEST,
        states=states,
        hf_config=SimpleNamespace(architectures=["SomeModel"]),
    )


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    with get_context().override_server_args():
        yield


@pytest.fixture(autouse=True)
def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layout, pipeline):
        monkeypatch.setattr(module, "mambaish_config", lambda of: of.states)
    monkeypatch.setattr(addressing, "addressable_bytes", lambda *_: 1 << 32)


def laid_out(of: Any, *, elastic: bool, device_type: str = "cuda") -> CacheLayout:
    return layout.make_layout(
        of,
        token_bytes=TOKEN_BYTES,
        page_size=PAGE,
        device_type=device_type,
        elastic=elastic,
    )


def test_fixed_pools_take_what_sglangs_tensors_take() -> None:
    found = laid_out(model(), elastic=False)
    assert (found.page_size, found.page_bytes) == (PAGE, TOKEN_BYTES * PAGE)
    assert found.slot_bytes == 3 * STATE_BYTES
    assert found.max_slots is None
    assert [len(group.layers) for group in found.attention] == [LAYERS]
    assert [len(group.layers) for group in found.states] == [3]


@pytest.mark.parametrize("arch", [AttentionArch.MHA, AttentionArch.MLA])
def test_elastic_pools_align_states_and_know_every_tensor(arch: AttentionArch) -> None:
    found = laid_out(model(arch), elastic=True)
    assert found.page_bytes == TOKEN_BYTES * PAGE
    (tensors,) = found.attention
    assert len(tensors.layers) == (LAYERS if arch == AttentionArch.MLA else 2 * LAYERS)
    # 60 and 4 bytes take 128 each, and 512 fill their place; 2304 in all.
    assert found.slot_bytes == 3 * (128 + 128 + 512) == 9 * 256
    assert found.addressable_slot_bytes == 1 << 32
    assert laid_out(model(arch), elastic=True, device_type="cpu").max_slots is None


# ------------------------------------------------------------- dividing the memory


class Running:
    """SGLang's arguments, and its configurator, as far as planning reads them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **schedule: Any) -> None:
        arguments = dict.fromkeys(
            ("max_mamba_cache_size", "max_total_tokens", "max_running_requests")
        )
        self.schedule = SimpleNamespace(page_size=PAGE, **(arguments | schedule))
        self.overridden: dict[str, int] = {}
        self.device, self.model_config = "cpu", model()
        self.post_capture_kv_active = False
        self.attn_dp_size = 1
        self.memory = PoolMemory()
        self.drafts = 0
        self.spec = SimpleNamespace(
            speculative_algorithm=None,
            speculative_eagle_topk=2,
            speculative_draft_attention_backend=None,
        )
        self.spec_aux_config = SimpleNamespace(
            draft_model_config=None, draft_kv_num_layers=None
        )
        self.kv_cache_dtype, self.draft_attn_tp_size = torch.bfloat16, 1
        for module in (elastic, draft_pages, scratch_layout):
            monkeypatch.setattr(module, "get_spec", lambda: self.spec)
        for module in (draft_pages, scratch_layout):
            monkeypatch.setattr(module, "drafts_per_step", lambda: self.drafts)
        monkeypatch.setattr(draft_pages, "mambaish_config", lambda _: None)
        monkeypatch.setattr(planning, "attention_backends", lambda: ("triton",))
        monkeypatch.setattr(planning, "mambaish_config", lambda of: of.states)
        for module in (planning.scratch, planning.passes):
            monkeypatch.setattr(module, "drafts_per_step", lambda: self.drafts)
        for kind in ("eager", "cuda_graph"):
            name = f"get_{kind}_max_batch_size"
            monkeypatch.setattr(planning.records, name, lambda count: count)
        features = SimpleNamespace(enable_memory_saver=False)
        alone = SimpleNamespace(launch_world_size=1, pp_size=1)
        for module in (planning, elastic):
            monkeypatch.setattr(module, "get_schedule", lambda: self.schedule)
        monkeypatch.setattr(
            elastic, "get_exec", lambda: SimpleNamespace(features=features)
        )
        for module in (elastic, pipeline, planning):
            monkeypatch.setattr(module, "get_parallel", lambda: alone)
        monkeypatch.setattr(planning, "get_context", lambda: self)
        monkeypatch.setattr(
            planning,
            "create_memory_pool_configurator",
            lambda _: SimpleNamespace(
                _cell_size=TOKEN_BYTES, _compute_cell_size=lambda *_: TOKEN_BYTES
            ),
        )

    def verify(self, drafts: int, draft_layers: int = 0) -> None:
        """Verify so many tokens of a sequence, of a draft model with other heads."""
        self.drafts, self.spec.speculative_algorithm = drafts, "EAGLE"
        if draft_layers:
            self.spec_aux_config = SimpleNamespace(
                draft_model_config=SimpleNamespace(
                    attention_arch=AttentionArch.MHA,
                    hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
                    head_dim=8,
                    get_num_kv_heads=lambda _: 5,
                ),
                draft_kv_num_layers=draft_layers,
            )

    def override(self, source: str, **values: int) -> None:
        """What the plugin sets."""
        self.overridden |= values

    def _get_ple_req_pool_kwargs(self) -> dict[str, Any]:
        return {}

    def reserve(self, available: int, **options: Any) -> PoolSizes:
        """Sizes of the pools out of so many bytes, as SGLang comes to know them."""
        gib = planning.reserve_slots(
            self, available / (1 << 30), HybridConfig(**options), self.memory
        )
        plan = self.memory.plan
        assert plan is not None
        assert self.overridden["max_mamba_cache_size"] == plan.sizes.slots - 1
        assert int(gib * (1 << 30)) == plan.sizes.pages * plan.layout.page_bytes
        tokens = (plan.sizes.pages - 1) * PAGE
        assert planning.limit_tokens(1 << 40, self.memory) == tokens
        assert planning.limit_tokens(PAGE, self.memory) == PAGE
        return plan.sizes


def test_fixed_pools_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(monkeypatch)
    sizes = running.reserve(MIB, elastic=False)
    spent = sizes.pages * TOKEN_BYTES * PAGE + sizes.slots * 3 * STATE_BYTES
    assert MIB - TOKEN_BYTES * PAGE < spent <= MIB
    assert running.memory.shared is None


@pytest.mark.parametrize("elastic", [None, False, True])
def test_states_alone_get_all_memory_however_elastic(
    monkeypatch: pytest.MonkeyPatch, elastic: bool | None
) -> None:
    """Pages take none, and number whatever the slots can hold."""
    running = Running(monkeypatch)
    running.model_config.states.full_attention_layer_ids = []
    kv = SimpleNamespace(_cell_size=0, _compute_cell_size=lambda *_: 0)
    monkeypatch.setattr(planning, "create_memory_pool_configurator", lambda _: kv)
    assert layout.keeps_states_alone(running.model_config)
    options = HybridConfig(elastic=elastic)
    gib = planning.reserve_slots(running, MIB / (1 << 30), options, running.memory)
    plan = running.memory.plan
    assert plan is not None and plan.shared is None and running.memory.shared is None
    assert plan.layout.has_states_alone and plan.layout.page_size == PAGE
    slots = MIB // (3 * STATE_BYTES)
    assert plan.sizes == PoolSizes(slots * (LONGEST // PAGE) + 1, slots)
    assert running.overridden["max_mamba_cache_size"] == slots - 1
    assert int(gib * (1 << 30)) == 1, "SGLang would take 0 for weights without room"
    # SGLang would count the tokens of one sequence.
    assert running.overridden["max_total_tokens"] == slots * LONGEST


def test_rows_of_pages_without_kv_hold_nothing() -> None:
    kept = SimpleNamespace(
        conv=[torch.zeros(2, 5, 3, 2)],
        temporal=torch.zeros(2, 5, 4),
        intermediate_ssm=None,
        intermediate_conv_window=None,
    )
    states = SimpleNamespace(mamba_cache=kept, _slot_siblings=())
    kv = type("MHATokenToKVPool", (), {"k_buffer": (), "v_buffer": ()})()
    pools = SimpleNamespace(full_kv_pool=kv, size=6 * PAGE)
    executor = PoolMemory().executor(pools, states, PAGE)
    kept.temporal[:, 1] = 3.0
    executor.run([Copy(Pool.KV, 1, 6), Copy(Pool.STATE, 1, 4)])
    assert bool((kept.temporal[:, 4] == 3.0).all())


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@needs_returned_memory
def test_rows_of_host_memory_are_those_of_the_pools(
    monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    running = Running(monkeypatch)
    running.reserve(4 * MIB, elastic=elastic, host_memory=8 * MIB)
    plan = running.memory.plan
    assert plan is not None and plan.host is not None
    assert plan.host.row_bytes == {
        Pool.KV: plan.layout.page_bytes,
        Pool.STATE: plan.layout.slot_bytes,
    }
    assert 7 * MIB < plan.host.budget <= 8 * MIB


def test_rows_of_host_memory_hold_the_kv_of_a_draft_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running(monkeypatch, max_running_requests=3)
    running.verify(4, draft_layers=1)
    running.reserve(4 * MIB, elastic=False, host_memory=8 * MIB)
    plan = running.memory.plan
    assert plan is not None and plan.host is not None and plan.shared is None
    draft = 2 * 5 * 8 * 2 * PAGE
    assert plan.host.row_bytes[Pool.KV] == TOKEN_BYTES * PAGE + draft


def test_copies_to_the_host_leave_less_for_the_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = Running(monkeypatch).reserve(4 * MIB, elastic=False)
    monkeypatch.setattr(planning.host_copies, "device_bytes", lambda *_: 2 * MIB)
    with_host = Running(monkeypatch).reserve(4 * MIB, elastic=False, host_memory=MIB)
    assert 0.4 * without.pages < with_host.pages < 0.6 * without.pages


def test_pages_and_slots_of_flags_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"max_total_tokens": 1024, "max_mamba_cache_size": 20}
    assert Running(monkeypatch, **flags).reserve(8 * MIB) == PoolSizes(65, 21)


def test_the_states_after_drafts_are_beside_the_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running(monkeypatch, max_running_requests=3)
    running.drafts = 4
    sizes = running.reserve(MIB, elastic=False)
    spent = sizes.pages * TOKEN_BYTES * PAGE + sizes.slots * 3 * STATE_BYTES
    # SGLang has a row more than sequences, for padding.
    left = MIB - 4 * 4 * 3 * STATE_BYTES
    assert left - TOKEN_BYTES * PAGE < spent <= left


def with_key_heads(running: Running) -> tuple[int, int]:
    """Layers that drafts can be recorded of; bytes of a slot and of a row of 4."""
    params = running.model_config.states.mamba2_cache_params
    params.is_kda = False
    params.shape.conv = [(48, 3)]  # two groups of 8, twice, beside 4 x 4 values
    slot = 3 * (48 * 3 * 2 + 4 * 4 * 8 * 4)
    params.mamba_cache_per_req = slot
    # Keys, values and decays in float32, and inputs in bfloat16.
    return slot, 4 * 3 * (4 * (2 * 8 + 4 * 4 + 4) + 2 * 48)


@pytest.mark.parametrize(
    ("limits", "rows"),
    [({"max_running_requests": 3}, 3), ({"max_mamba_cache_size": 5}, 5), ({}, None)],
    ids=["requests", "slots", "memory"],
)
def test_records_of_drafts_are_beside_the_pools(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], rows: int | None
) -> None:
    running = Running(monkeypatch, **limits)
    running.drafts = 4
    slot, row = with_key_heads(running)
    sizes = running.reserve(MIB, elastic=False, draft_states="replay")
    rows = rows or MIB // (slot + row)
    left = MIB - rows * row
    spent = sizes.pages * TOKEN_BYTES * PAGE + sizes.slots * slot
    assert left - TOKEN_BYTES * PAGE - slot < spent <= left
    assert min(sizes.slots - 1, limits.get("max_running_requests", MIB)) <= rows


def test_no_more_sequences_verify_than_there_are_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = Running(monkeypatch, max_mamba_cache_size=5)
    running.drafts = 2
    with caplog.at_level(logging.INFO):
        assert running.reserve(8 * MIB).slots == 6
    assert "of 5 sequences with 2 tokens each to verify" in caplog.text


@needs_returned_memory
@pytest.mark.parametrize("draft_layers", [0, 1], ids=["n-gram", "a draft model"])
def test_rows_that_verify_share_the_memory(
    monkeypatch: pytest.MonkeyPatch, draft_layers: int
) -> None:
    running = Running(monkeypatch, max_running_requests=3)
    running.verify(4, draft_layers)
    running.reserve(4 * MIB)
    shared = running.memory.shared
    assert shared is not None
    try:
        scratch = shared.plan.layout.scratch
        assert scratch is not None and scratch.rows == 3
        # Each layer's states lie apart, windows side by side, each aligned.
        assert scratch.apart == (4 * 4 * 4 * 8 * 4,) * 3
        assert scratch.together >= 3 * (256 + 128)
        windows, small, states = shared.scratch
        rows = shared.plan.ids(Pool.SCRATCH)
        assert windows.shape == (3, rows, 4, 10, 3)
        assert small.shape == (3, rows, 4, 2) and states.shape == (3, rows, 4, 4, 4, 8)
        groups = shared.plan.layout.attention
        assert [len(group.layers) for group in groups] == [4, 2][: 1 + draft_layers]
        assert groups[-1].page_bytes == (5 * 8 if draft_layers else 3 * 8) * 2 * PAGE
    finally:
        shared.memory.close()


@needs_returned_memory
def test_records_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of records, side by side, in the place of states."""
    running = Running(monkeypatch, max_running_requests=3)
    running.verify(4)
    _, row = with_key_heads(running)
    running.reserve(4 * MIB, draft_states="replay")
    shared = running.memory.shared
    assert shared is not None
    try:
        scratch = shared.plan.layout.scratch
        assert scratch is not None and scratch.rows == 3
        assert scratch.apart == () and row <= scratch.together < row + 6 * 128
        recorded, inputs = shared.scratch
        rows = shared.plan.ids(Pool.SCRATCH)
        assert recorded.shape == (3, rows, 4, 2 * 8 + 4 * 4 + 4)
        assert inputs.shape == (3, rows, 4, 48) and inputs.dtype == torch.bfloat16
    finally:
        shared.memory.close()


@needs_returned_memory
def test_sglang_runs_no_more_sequences_than_can_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running(monkeypatch, max_running_requests=2000)
    running.verify(4)
    running.reserve(4 * MIB)
    shared = running.memory.shared
    assert shared is not None and shared.plan.layout.scratch is not None
    rows = shared.plan.layout.scratch.rows
    shared.memory.close()
    assert running.overridden["max_running_requests"] == rows < 600


def test_rows_lie_beside_pools_that_are_too_small_to_share(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where elastic pools are switched off: the pools get what the rows leave."""
    running = Running(monkeypatch, max_running_requests=2)
    running.verify(4)
    with caplog.at_level(logging.INFO):
        sizes = running.reserve(MIB, elastic=False)
    assert "beside the pools hold the states after drafts, of 2 sequences" in (
        caplog.text
    )
    spent = sizes.pages * TOKEN_BYTES * PAGE + sizes.slots * 3 * STATE_BYTES
    assert spent <= MIB - 3 * 4 * 3 * STATE_BYTES


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"max_total_tokens": 511}, "--max-total-tokens leaves 32 pages, and one"),
        ({"max_mamba_cache_size": 0}, "--max-mamba-cache-size leaves 1 state slots"),
        ({"max_mamba_cache_size": 600}, "--max-mamba-cache-size leaves 3 pages, and"),
    ],
)
def test_flags_too_small_for_the_longest_sequence(
    flags: dict[str, int], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Running(monkeypatch, **flags).reserve(MIB)


def test_ranks_of_data_parallel_attention_divide_the_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As SGLang divides --max-mamba-cache-size; each rank has a cache of its own."""
    running = Running(monkeypatch, max_mamba_cache_size=9)
    running.attn_dp_size = 4
    assert running.reserve(MIB).slots == 9 // 4 + 1


@needs_returned_memory
@pytest.mark.parametrize(
    ("backends", "unknown"),
    [(("triton", "fa3"), None), (("triton", "trtllm_mha"), "kernels of trtllm_mha")],
)
def test_elastic_pools_get_memory_to_share(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backends: tuple[str, ...],
    unknown: str | None,
) -> None:
    running = Running(monkeypatch)
    monkeypatch.setattr(planning, "attention_backends", lambda: backends)
    with caplog.at_level(logging.INFO):
        running.reserve(4 * MIB)
    shared = running.memory.shared
    assert shared is not None and running.memory.plan is not None
    assert shared.plan.layout.packed == (unknown is None)
    assert ("the pages of each layer apart" in caplog.text) == (unknown is not None)
    assert unknown is None or unknown in caplog.text
    try:
        assert shared.plan is running.memory.plan.shared
        assert shared.memory.usable == shared.plan.budget < 4 * MIB
    finally:
        shared.memory.close()
