# SPDX-License-Identifier: Apache-2.0
"""Which graphs with prefills are kept, by measured times."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import graph_times
from tests.vllm.test_prefill_graphs import found_by, manager_with

LAUNCH = 0.025
"""Seconds in which the host launches a pass."""
COMPILED = 10.0
"""More that its first time takes."""
TOKEN = LAUNCH / 1000
"""Seconds that the device computes with one: replays beyond 1,000 save nothing."""
Create = Callable[[BatchExecutionDescriptor, bool], Callable[[Any], None]]


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_prefill_graphs([Mixer.MAMBA2])


class Device:
    """A clock that passes as work is launched, and as the device is waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queued = 0.0
        self.warmed: list[int] = []
        self.inputs: BatchExecutionDescriptor | None = None
        """The graph whose inputs lie in the buffers that all graphs read."""

    def synchronize(self) -> None:
        self.now, self.queued = max(self.now, self.queued), 0.0

    def forward(self, graph: BatchExecutionDescriptor) -> Callable[[Any], None]:
        def run(mode: Any) -> None:
            first = graph.num_tokens not in self.warmed
            self.warmed.append(graph.num_tokens)
            self.now += LAUNCH + COMPILED * first
            self.queued = self.now + TOKEN * graph.num_tokens

        return run

    def replay(self, graph: BatchExecutionDescriptor) -> Any:
        def run() -> None:
            assert self.inputs == graph, "attention reads beside its tables"
            self.queued = self.now + TOKEN * graph.num_tokens

        return SimpleNamespace(replay=run)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(graph_times.time, "perf_counter", lambda: found.now)
    monkeypatch.setattr(graph_times.torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(graph_times, "_agree", lambda saves: None)
    return found


def captured(device: Device, *, profiling: bool = False) -> Any:
    """A manager of vLLM that captured its graphs and ours."""
    manager: Any = manager_with()[0]
    manager._max_full_descs_to_capture = 2 if profiling else None
    manager.graphs = {}

    def original(manager: Any, create: Create, title: str) -> None:
        for graph in manager._capture_descs[CUDAGraphMode.FULL]:
            create(graph, True)(CUDAGraphMode.NONE)
            manager.graphs[graph] = device.replay(graph)

    def create(graph: BatchExecutionDescriptor, warmup: bool) -> Any:
        device.inputs = graph
        return device.forward(graph)

    graph_times.capture(original, manager, create, "Capturing")
    return manager


def test_a_graph_stays_while_its_replay_takes_no_longer_than_a_launch(
    device: Device,
) -> None:
    manager = captured(device)
    whole = CUDAGraphMode.FULL
    assert [found_by(manager, 1, n)[:2] for n in (40, 600, 700)] == [
        (whole, 64),
        (whole, 768),
        (whole, 768),
    ]
    assert found_by(manager, 1, 769)[0] == CUDAGraphMode.NONE, "1,024 take 25.6 ms"
    prefills = [graph.num_tokens for graph in manager.graphs if not _decodes(graph)]
    assert max(prefills) == 768


def test_what_compiling_takes_counts_for_nothing(device: Device) -> None:
    captured(device)
    assert device.warmed.count(1536) == 2
    assert device.warmed.count(1) == 1, "a graph of decodes is none of ours"


def test_the_longest_pass_runs_before_all_others(device: Device) -> None:
    """vLLM keeps room for as many outputs as the first pass has."""
    captured(device)
    assert device.warmed[0] == 2048


def test_graphs_that_vllm_drops_are_not_timed(device: Device) -> None:
    manager = captured(device, profiling=True)
    assert device.warmed.count(1536) == 1
    assert max(graph.num_tokens for graph in manager.graphs) == 2048


def test_what_one_rank_drops_all_do(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agree(saves: Any) -> None:
        saves[0] = 0  # the smallest, of 16 tokens

    monkeypatch.setattr(graph_times, "_agree", agree)
    manager = captured(device)
    assert found_by(manager, 1, 10)[0] == CUDAGraphMode.PIECEWISE
    assert found_by(manager, 1, 40)[:2] == (CUDAGraphMode.FULL, 64)


def test_the_log_says_what_is_replayed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        graph_times.activation.logger, "info", lambda text, *of: said.append(text % of)
    )
    captured(device)
    monkeypatch.setattr("tests.vllm.test_graph_times.TOKEN", LAUNCH)
    captured(device)
    assert said[0].startswith(
        "passes with prefills of up to 768 tokens and 12 sequences replay CUDA "
        "graphs: 19.2 ms, where the host needs 25.0 to launch one"
    )
    assert said[1].startswith("passes with prefills replay no CUDA graphs")


def _decodes(graph: BatchExecutionDescriptor) -> bool:
    return graph.uniform_token_count is not None


def test_longer_passes_than_vllms_graphs_have_one_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", _split)
    patches._patch_attention_in_graphs()
    build: Any = FlashAttentionMetadataBuilder.build
    config = manager_with()[0].vllm_config
    builder = SimpleNamespace(
        vllm_config=config, max_cudagraph_size=512, max_num_splits=32
    )

    def splits(tokens: int) -> int:
        metadata = SimpleNamespace(num_actual_tokens=tokens)
        return int(build(builder, 0, metadata))

    assert [splits(n) for n in (1, 512, 513, 2048, 2049)] == [32, 32, 1, 1, 0]
    assert (builder.max_cudagraph_size, builder.max_num_splits) == (512, 32)
    builder.max_num_splits = 0  # FlashAttention 2 and 4 choose as they are captured
    assert splits(2048) == 0


def _split(
    self: Any,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
) -> int:
    tokens = common_attn_metadata.num_actual_tokens
    return self.max_num_splits if tokens <= self.max_cudagraph_size else 0
