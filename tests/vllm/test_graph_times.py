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
from hybrid_plugin.vllm.kernels import graph_times, layers, prefill_graphs
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
        self.rows = 0
        """Sequences in those."""
        self.sequence = 0.0
        """Seconds that each sequence but the first adds to a replay."""
        self.left: list[int] = []
        """Tokens of those that were left alone in their graphs."""

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
            self.queued += self.sequence * (self.rows - 1)

        return SimpleNamespace(replay=run)

    def fill(self, graph: BatchExecutionDescriptor) -> None:
        assert graph.num_reqs is not None
        self.inputs, self.rows = graph, graph.num_reqs

    def leave_one(self, tokens: int) -> None:
        self.rows = 1
        self.left.append(tokens)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(graph_times.time, "perf_counter", lambda: found.now)
    monkeypatch.setattr(graph_times.torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(graph_times, "_agree", lambda saves: None)
    return found


def captured(device: Device, *, profiling: bool = False, ranks: int = 1) -> Any:
    """A manager of vLLM that captured its graphs and ours."""
    manager: Any
    manager, found = manager_with()
    manager.vllm_config.parallel_config.data_parallel_size = ranks
    tables: Any = SimpleNamespace(leave_one=device.leave_one, limits=found.graphs)
    found.tables.append(tables)
    manager._max_full_descs_to_capture = 2 if profiling else None
    manager.graphs = {}

    def original(manager: Any, create: Create, title: str) -> None:
        for graph in manager._capture_descs[CUDAGraphMode.FULL]:
            create(graph, True)(CUDAGraphMode.NONE)
            manager.graphs[graph] = device.replay(graph)

    def create(graph: BatchExecutionDescriptor, warmup: bool) -> Any:
        device.fill(graph)
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
    described = manager._capture_descs[whole]
    assert max(graph.num_tokens for graph in described) == 768, "captured once more"


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
        "passes with prefills of up to 768 tokens and 12 sequences replay CUDA graphs: "
        "19.2 ms for one sequence and 19.2 for 12, where the host needs 25.0 to launch"
    )
    assert said[1] == (
        "passes with prefills replay no CUDA graphs: that of 16 tokens takes 400.0 ms "
        "for one sequence, and the host launches its pass in 25.0."
    )


def test_a_graph_is_replayed_for_as_many_sequences_as_take_no_longer(
    device: Device,
) -> None:
    device.sequence = 0.004
    manager = captured(device)
    # 64 tokens take 1.6 ms, and six of twelve sequences 21.6.
    assert found_by(manager, 6, 40)[:3] == (CUDAGraphMode.FULL, 64, 12)
    assert found_by(manager, 7, 40)[0] == CUDAGraphMode.PIECEWISE
    assert found_by(manager, 7, 7, decodes=True)[0] == CUDAGraphMode.FULL
    # 768 take 19.2 ms, and two sequences 23.2.
    assert found_by(manager, 2, 700)[0] == CUDAGraphMode.FULL
    assert found_by(manager, 3, 700)[0] == CUDAGraphMode.NONE
    assert found_by(manager, 6, 40)[1] == 64, "what finds none changes nothing"


def test_one_sequence_is_timed_as_long_as_no_smaller_graph_has_it(
    device: Device,
) -> None:
    captured(device)
    assert sorted(device.left) == [1, 17, 65, 129, 193, 257, 385, 513, 769, 1025, 1537]


def test_data_parallel_ranks_replay_a_graph_for_all_sequences_or_none(
    device: Device,
) -> None:
    device.sequence = 0.001  # 128 tokens and 12 sequences take 14.2 ms, 768 take 30.2
    manager = captured(device, ranks=2)
    assert found_by(manager, 1, 100)[0] == CUDAGraphMode.FULL
    assert found_by(manager, 1, 700)[0] == CUDAGraphMode.NONE


def test_only_what_replays_a_graph_is_described_as_its_pass(device: Device) -> None:
    manager = captured(device)
    found = layers.all_of(manager.vllm_config)
    assert found is not None and found.graphs is not None
    for limits in (found.graphs, found.tables[0].limits):
        assert limits.hold(12, 64) and limits.hold(12, 768)
        assert not limits.hold(11, 64), "a pass that was not padded"
        assert not limits.hold(12, 700) and not limits.hold(12, 1024)
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()  # as for a new manager, whose graphs are not timed yet
    for limits in (found.graphs, found.tables[0].limits):
        assert limits.hold(12, 1024) and limits.kept is None


def test_a_pass_that_was_described_as_another_replays_no_graph(device: Device) -> None:
    manager = captured(device)
    found = layers.all_of(manager.vllm_config)
    assert found is not None
    graph = manager.dispatch(1, 40, None, 0)
    tables: Any = found.tables[0]
    tables.rows = 12
    prefill_graphs.count(manager, graph)
    assert found.replayed == 1
    tables.rows = 0
    with pytest.raises(RuntimeError, match="described as another"):
        prefill_graphs.count(manager, graph)


@pytest.mark.parametrize(
    ("least", "most", "sequences"),
    [(1, 10, 64), (1, 21, 29), (9.9, 1000, 1), (10.1, 11, 0), (11, 11, 0)],
)
def test_sequences_of_a_graph(least: float, most: float, sequences: int) -> None:
    assert graph_times.Times(10, least, most).sequences(64) == sequences


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
