# SPDX-License-Identifier: Apache-2.0
"""Which memory pools share, and the sentences where they cannot."""

from __future__ import annotations

import logging
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_plugin.config import ConfigError, HybridConfig
from hybrid_plugin.device.cuda_arena import CudaArena
from hybrid_plugin.device.host_arena import HostArena
from hybrid_plugin.device.virtual_arena import VirtualArena
from hybrid_plugin.engine import elastic_memory

LOG = logging.getLogger("test")
KIB, MIB = 1 << 10, 1 << 20


def test_a_cpu_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert elastic_memory.obstacle("cpu") is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert elastic_memory.obstacle("cpu") == (
        "need Linux on a CPU; set elastic to false."
    )


def test_a_gpu_needs_the_driver_s_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = elastic_memory.obstacle("cuda")
    assert found is not None and "cuda-bindings" in found
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert elastic_memory.obstacle("cuda") is None


def test_other_devices_are_named() -> None:
    assert "of the type xpu" in (elastic_memory.obstacle("xpu") or "")


@pytest.mark.parametrize("hindrance", [None, "need a thing; set elastic to false."])
def test_what_cannot_be_had_is_refused_only_if_it_was_asked_for(
    hindrance: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    is_wanted = partial(elastic_memory.is_wanted, states_alone=False)
    assert not is_wanted(HybridConfig(elastic=False), hindrance, LOG)
    assert not caplog.messages
    with caplog.at_level(logging.INFO):
        wanted = is_wanted(HybridConfig(), hindrance, LOG)
    assert wanted == (hindrance is None)
    assert caplog.messages == (
        []
        if hindrance is None
        else [
            f"hybrid-plugin gives each pool its own memory: elastic pools {hindrance}"
        ]
    )
    asked = HybridConfig(elastic=True)
    if hindrance is None:
        assert is_wanted(asked, hindrance)
        return
    with pytest.raises(ConfigError, match=r"^elastic pools need a thing; set"):
        is_wanted(asked, hindrance)


@pytest.mark.parametrize("elastic", [None, False, True])
def test_states_alone_have_one_pool_whatever_is_asked_for(
    elastic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    options = HybridConfig(elastic=elastic)
    for hindrance in (None, "need a thing; set elastic to false."):
        with caplog.at_level(logging.INFO):
            assert not elastic_memory.is_wanted(
                options, hindrance, LOG, states_alone=True
            )
    assert not caplog.messages, "nothing is missing"


def test_host_memory_comes_in_some_thousand_blocks() -> None:
    assert elastic_memory.block_bytes(8 * MIB, "cpu") == 16 * KIB
    for budget in (1 << 28, 1 << 30, 1 << 33):
        size = elastic_memory.block_bytes(budget, "cpu")
        assert budget // size <= 8192
    assert elastic_memory.block_bytes(1 << 40, "cpu") == 2 * MIB


def test_gpu_memory_comes_in_blocks_that_grow_with_the_device() -> None:
    assert elastic_memory.block_bytes(8 * MIB, "cuda") == 2 * MIB
    assert elastic_memory.block_bytes(2 << 30, "cuda") == 2 * MIB
    assert elastic_memory.block_bytes(6 << 30, "cuda") == 8 * MIB
    assert elastic_memory.block_bytes(12 << 30, "cuda") == 16 * MIB
    assert elastic_memory.block_bytes(140 << 30, "cuda") == 16 * MIB


def test_blocks_follow_from_what_every_rank_knows() -> None:
    unlimited, little = HybridConfig(), HybridConfig(gpu_memory_budget=3 * MIB)
    assert elastic_memory.bound(unlimited, None, 5 * MIB) == 5 * MIB
    assert elastic_memory.bound(unlimited, 4 * MIB, 5 * MIB) == 4 * MIB
    assert elastic_memory.bound(little, 4 * MIB, 5 * MIB) == 3 * MIB


def test_the_option_limits_what_is_taken() -> None:
    options = HybridConfig(gpu_memory_budget=3 * MIB)
    assert elastic_memory.limited(8 * MIB, options) == 3 * MIB
    assert elastic_memory.limited(2 * MIB, options) == 2 * MIB
    memory = elastic_memory.take(
        8 * MIB, options, torch.device("cpu"), block_bytes=16 * KIB, log=LOG
    )
    try:
        assert isinstance(memory, HostArena)
        assert memory.held == memory.usable == 3 * MIB - memory.block_bytes
    finally:
        memory.close()


@pytest.mark.parametrize(("stages", "stream_alone"), [(1, False), (2, True)])
def test_stages_wait_for_the_stream_of_their_passes(
    stages: int, stream_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other streams may wait for what another rank does later."""
    memory = elastic_memory.take(
        MIB,
        HybridConfig(),
        torch.device("cpu"),
        block_bytes=16 * KIB,
        log=LOG,
        stages=stages,
    )
    memory.close()
    arena = CudaArena.__new__(CudaArena)
    arena.waits_for_stream = memory.waits_for_stream
    arena._device = torch.device("cuda", 1)
    waited: list[tuple[str, torch.device]] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(("stream", device)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: waited.append(("device", device))
    )
    arena._wait()
    assert waited == [("stream" if stream_alone else "device", arena._device)]


@pytest.mark.parametrize("available", [-143 * MIB, 0, 8 * KIB - 1])
def test_no_memory_at_all_is_said_in_a_sentence(available: int) -> None:
    with pytest.raises(
        ConfigError, match=r"^There are .* MiB for the cache, less than"
    ):
        elastic_memory.take(
            available, HybridConfig(), torch.device("cpu"), block_bytes=4 * KIB, log=LOG
        )


def test_less_memory_than_hoped_for_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostArena, "_create", lambda self, blocks: (32, "no more"))
    memory: VirtualArena = elastic_memory.take(
        4 * MIB, HybridConfig(), torch.device("cpu"), block_bytes=16 * KIB, log=LOG
    )
    assert memory.held == 32 * memory.block_bytes
    assert "refused: no more; the cache goes on with 0.5 MiB" in caplog.text
