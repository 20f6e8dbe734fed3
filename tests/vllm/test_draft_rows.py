# SPDX-License-Identifier: Apache-2.0
"""Slots by column, in the tables of both model runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode

from hybrid_plugin.core.commands import MoveWindow, Pool
from hybrid_plugin.upstream.hookpoints import resolve
from hybrid_plugin.vllm import contracts
from hybrid_plugin.vllm.speculation import patches, windows
from hybrid_plugin.vllm.speculation.block_tables import write_rows
from tests.vllm.test_draft_serving import state

STATES = 1
"""Place of the group of state layers."""


def tables() -> list[BlockTable]:
    """Of pages and of states, of two requests."""
    return [
        BlockTable(
            block_size=16,
            max_num_reqs=2,
            max_num_blocks_per_req=4,
            max_num_batched_tokens=8,
            pin_memory=False,
            device=torch.device("cpu"),
            cp_kv_cache_interleave_size=1,
            slot_mapping_mode=SlotMappingMode.NONE,
        )
        for _ in range(2)
    ]


def v1_runner(rows: dict[str, int]) -> Any:
    """Two requests with a page and a slot each, of which `rows` are in the batch."""
    runner = SimpleNamespace(
        requests={
            name: SimpleNamespace(block_ids=([10 + i], [20 + i]))
            for i, name in enumerate("ab")
        },
        input_batch=SimpleNamespace(req_id_to_index=rows, block_table=tables()),
    )
    for name, row in rows.items():
        for table, ids in zip(
            runner.input_batch.block_table, runner.requests[name].block_ids, strict=True
        ):
            table.add_row(ids, row)
    return runner


def test_v1_rows_are_overwritten_and_lent_again() -> None:
    runner = v1_runner({"a": 0, "b": 1})
    write_rows(runner, [STATES], {"b": [21, 5, 6, 7]}, v2=False)
    write_rows(runner, [STATES], {"b": [21, 8, 9]}, v2=False)
    pages, states = runner.input_batch.block_table
    assert states.get_numpy_array()[1, :3].tolist() == [21, 8, 9]
    assert states.get_numpy_array()[0].tolist() == [20, 0, 0, 0]
    assert pages.get_numpy_array()[:, 0].tolist() == [10, 11]
    assert runner.requests["b"].block_ids == ([11], [21, 8, 9])


def test_v1_what_is_not_in_the_batch_comes_back_with_its_columns() -> None:
    runner = v1_runner({"a": 0})
    write_rows(runner, [STATES], {"b": [21, 5]}, v2=False)
    assert runner.requests["b"].block_ids == ([11], [21, 5])
    assert runner.input_batch.block_table[STATES].get_numpy_array()[1].sum() == 0


def test_v2_rows_are_staged_whole() -> None:
    written: list[Any] = []

    def table(group: int) -> Any:
        return SimpleNamespace(stage_write=lambda *row: written.append((group, *row)))

    runner = SimpleNamespace(
        req_states=SimpleNamespace(req_id_to_index={"a": 3}),
        block_tables=SimpleNamespace(
            block_tables=[table(0), table(1)],
            num_blocks=SimpleNamespace(np=np.full((2, 4), 9, dtype=np.int32)),
        ),
    )
    write_rows(runner, [STATES], {"a": [20, 5, 6]}, v2=True)
    assert written == [(STATES, 3, 0, [20, 5, 6])]
    assert runner.block_tables.num_blocks.np[STATES].tolist() == [9, 9, 9, 3]
    assert runner.block_tables.num_blocks.np[0].tolist() == [9] * 4


@pytest.mark.parametrize("channels_first", [False, True])
def test_windows_are_those_of_convolutions(
    channels_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear attention has none; the others' lie first among a layer's states."""
    monkeypatch.setattr(windows, "is_conv_state_dim_first", lambda: channels_first)
    inputs = torch.arange(4 * 6 * 2).view(4, 6, 2)
    stored = inputs.transpose(1, 2).contiguous() if channels_first else inputs.clone()
    kind = MambaAttentionBackendEnum
    layers = {
        "c": SimpleNamespace(kv_cache=(stored, None)),
        "l": SimpleNamespace(kv_cache=(torch.zeros(4, 2),)),
    }
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        num_speculative_tokens=3,
    )
    linear = state(kind.LINEAR)
    specs = {"c": state(kind.GDN_ATTN), "l": linear}
    windows.rolling_windows(config, specs, ours={"c"}).move(
        [MoveWindow(Pool.STATE, 1, 2, 3)]
    )
    seen = stored.transpose(1, 2) if channels_first else stored
    assert torch.equal(seen, inputs), "our kernels leave a window in each column"
    found = windows.rolling_windows(config, specs, ours=())
    found.move([MoveWindow(Pool.STATE, 1, 2, 3)])
    assert torch.equal(seen[3, :3], inputs[1, 2:5])
    assert torch.equal(seen[3, 3:], inputs[3, 3:])


# ------------------------------------------------- rows that sit out a step (V1)


class Runner:
    """The part of a V1 model runner that drops rows and takes them back."""

    def __init__(self, accepted: dict[str, int]) -> None:
        self.requests = dict.fromkeys(accepted)
        self.input_batch = SimpleNamespace(
            req_id_to_index={name: i for i, name in enumerate(accepted)},
            num_accepted_tokens_cpu=np.array([*accepted.values()], dtype=np.int64),
        )

    def update(self, output: Any) -> str:
        """As vLLM: what is not scheduled leaves, what comes (back) has 1 accepted."""
        rows = self.input_batch.req_id_to_index
        counts = self.input_batch.num_accepted_tokens_cpu
        kept = {
            name: int(counts[row])
            for name, row in rows.items()
            if name in output.num_scheduled_tokens
        }
        for name in output.finished:
            self.requests.pop(name)
        rows.clear()
        for row, name in enumerate(output.num_scheduled_tokens):
            self.requests.setdefault(name)
            rows[name] = row
            counts[row] = kept.get(name, 1)
        return "corrections"

    def accepted(self) -> dict[str, int]:
        """By request."""
        counts = self.input_batch.num_accepted_tokens_cpu
        rows = self.input_batch.req_id_to_index
        return {name: int(counts[row]) for name, row in rows.items()}


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`update` of that runner, as the patch leaves it."""
    owner, name = resolve(contracts.V1_UPDATE_STATES)
    monkeypatch.setattr(owner, name, Runner.update)
    patches.patch_paused_rows()
    patched = getattr(owner, name)

    def run(
        runner: Runner,
        *scheduled: str,
        resumed: tuple[str, ...] = (),
        new: tuple[str, ...] = (),
        finished: tuple[str, ...] = (),
    ) -> dict[str, int]:
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(scheduled, 1),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            finished=finished,
        )
        assert patched(runner, output) == "corrections"
        return runner.accepted()

    return run


def test_a_row_that_sat_out_keeps_what_was_accepted(update: Any) -> None:
    runner = Runner({"a": 2, "b": 4, "c": 3})
    assert update(runner, "a", "c") == {"a": 2, "c": 3}
    assert update(runner, "c") == {"c": 3}
    assert update(runner, "c", "a", "b") == {"c": 3, "a": 2, "b": 4}


def test_one_that_begins_anew_begins_in_column_0(update: Any) -> None:
    runner = Runner({"a": 2, "b": 4, "c": 3})
    update(runner)
    assert update(runner, "a", "b", "c", resumed=("a",), new=("b",)) == {
        "a": 1,
        "b": 1,
        "c": 3,
    }


def test_what_is_over_is_forgotten(update: Any) -> None:
    runner = Runner({"a": 2, "b": 4})
    update(runner, "a")
    update(runner, "a", finished=("b",))
    assert update(runner, "a", "b") == {"a": 2, "b": 1}
