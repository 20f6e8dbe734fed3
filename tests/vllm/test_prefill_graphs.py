# SPDX-License-Identifier: Apache-2.0
"""Which graphs with prefills vLLM is told to capture, and which batches find them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from hybrid_plugin.config import ConfigError
from hybrid_plugin.engine import kernel_choice
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import patches
from hybrid_plugin.vllm.kernels import layers, prefill_graphs
from hybrid_plugin.vllm.kernels.fixed_shape import GraphLimits
from hybrid_plugin.vllm.kernels.layers import StateLayers
from hybrid_plugin.vllm.kernels.state_layers import take_over
from tests.vllm import test_mamba2 as mamba2

SIZES = [1, 2, 4, 8, 16, 64, 128]


@pytest.fixture(autouse=True, scope="module")
def hooked() -> None:
    patches.patch_prefill_graphs([Mixer.MAMBA2])


class Attention(AttentionLayerBase):
    """A layer whose backend says what it is told to."""

    def __init__(self, support: AttentionCGSupport) -> None:
        builder = SimpleNamespace(get_cudagraph_support=lambda config, spec: support)
        self.backend: Any = SimpleNamespace(
            get_builder_cls=lambda: builder, get_name=lambda: "FLASH_ATTN"
        )

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return object()


def state_layers(*, wants_graphs: bool | None = True) -> tuple[Any, StateLayers]:
    layer = mamba2.layer_with()
    kind = layers.Kind(Mixer.MAMBA2, "mamba2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "kind_of", lambda _: kind)
        found = StateLayers({"0": layer}, "ours", "cpu")
    found.wants_graphs = wants_graphs
    found.hang()
    return layer, found


def manager_with(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    support: AttentionCGSupport = AttentionCGSupport.ALWAYS,
    *,
    wants_graphs: bool | None = True,
    budget: int = 8192,
    adapters: tuple[int, ...] = (0,),
    drafts: int = 0,
    sizes: Sequence[int] = SIZES,
    varying: str = "",
) -> tuple[ModelCudaGraphManager, StateLayers]:
    """vLLM's own, without what it asks a GPU for; its graphs count as captured."""
    layer, found = state_layers(wants_graphs=wants_graphs)
    found.drafts = drafts
    drafting = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: varying == "dynamic",
        num_speculative_tokens_per_batch_size=[(1, 2, 3)],
        num_speculative_tokens=drafts,
    )
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=sizes[-1],
            static_forward_context={"0": layer, "1": Attention(support)},
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=12, max_num_batched_tokens=budget
        ),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        speculative_config=drafting if drafts else None,
        num_speculative_tokens=drafts,
    )
    manager: Any = ModelCudaGraphManager.__new__(ModelCudaGraphManager)
    manager.vllm_config = config
    manager.compilation_config = config.compilation_config
    manager.max_num_reqs = config.scheduler_config.max_num_seqs
    manager.cudagraph_mode = mode
    manager.decode_query_len = 1 + drafts
    manager.varlen_decode = varying == "varlen"
    manager.ubatch_runner = None
    manager.lora_capture_cases = list(adapters)
    manager._lora_dispatch_map = {n: n for n in adapters if n}
    manager._max_lora_case = max(adapters)
    manager._candidates, manager._capture_descs = {}, {}
    manager._graphs_captured = True
    manager._init_candidates()
    return manager, found


def found_by(
    manager: ModelCudaGraphManager,
    sequences: int,
    tokens: int,
    *,
    decodes: bool = False,
    adapters: int = 0,
) -> tuple[CUDAGraphMode, int, int | None, int | None]:
    graph = manager.dispatch(sequences, tokens, 1 if decodes else None, adapters)
    shape = graph.num_tokens, graph.num_reqs, graph.uniform_token_count
    return graph.cg_mode, *shape


def test_a_pass_with_prefills_finds_a_whole_graph() -> None:
    manager, found = manager_with()
    whole = CUDAGraphMode.FULL
    assert found_by(manager, 1, 40) == (whole, 64, 12, None)
    assert found_by(manager, 12, 65) == (whole, 128, 12, None)
    assert found_by(manager, 3, 4) == (whole, 16, 12, None)
    assert found_by(manager, 1, 1) == (whole, 16, 12, None)  # a prompt of one token
    assert found.graphs == GraphLimits(12, 2048, 128)


def test_decodes_keep_their_own() -> None:
    manager, _ = manager_with()
    for sequences in range(1, 9):
        _, size, padded, uniform = found_by(manager, sequences, sequences, decodes=True)
        assert size == padded and uniform == 1 and size >= sequences


def test_shapes_tell_a_graph_of_decodes_from_one_with_prefills() -> None:
    manager, found = manager_with()
    assert found.graphs is not None
    for graph in manager._capture_descs[CUDAGraphMode.FULL]:
        assert graph.num_reqs is not None
        with_prefills = graph.uniform_token_count is None
        assert found.graphs.hold(graph.num_reqs, graph.num_tokens) == with_prefills


def test_drafts_alone_keep_their_own_and_prompts_beside_them_find_one() -> None:
    manager, found = manager_with(drafts=3)
    assert found.graphs == GraphLimits(12, 2048, 128, 4)
    whole = CUDAGraphMode.FULL
    uniform = [graph for graph in of_drafts(manager) if graph.num_reqs]
    assert {(graph.num_reqs, graph.num_tokens) for graph in uniform} == {
        (1, 4),
        (2, 8),
        (4, 16),
    }
    assert manager.dispatch(2, 8, 4, 0).num_reqs == 2
    # 12 sequences of 4 tokens have a graph of 48 in vLLM, where it captures one.
    assert found_by(manager, 3, 40) == (whole, 64, 12, None)
    assert found_by(manager, 3, 7) == (whole, 16, 12, None)  # ragged drafts
    for graph in manager._capture_descs[whole]:
        assert graph.num_reqs is not None
        prompts = graph.uniform_token_count is None
        assert found.graphs.hold(graph.num_reqs, graph.num_tokens) == prompts


def test_a_graph_that_vllm_has_for_drafts_is_not_ours_too() -> None:
    manager, found = manager_with(drafts=7, sizes=[8, 16, 96])
    assert found.graphs is not None
    # 12 rows of 8 are vLLM's graph of 96 tokens.
    assert found_by(manager, 5, 90) == (CUDAGraphMode.FULL, 96, 11, None)
    assert found_by(manager, 12, 90)[0] == CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("varying", ["dynamic", "varlen"])
def test_drafts_of_several_numbers_are_refused(varying: str) -> None:
    with pytest.raises(ConfigError, match="one number of drafts in all graphs"):
        manager_with(drafts=3, varying=varying)


def of_drafts(manager: ModelCudaGraphManager) -> list[Any]:
    graphs = manager._capture_descs[CUDAGraphMode.FULL]
    return [graph for graph in graphs if graph.uniform_token_count is not None]


def test_what_fits_none_runs_in_pieces_or_alone() -> None:
    manager, _ = manager_with()
    pieces = CUDAGraphMode.PIECEWISE
    assert found_by(manager, 13, 13)[0] == pieces  # more sequences than a graph has
    assert found_by(manager, 2, 2049)[0] == CUDAGraphMode.NONE
    decodes_only, _ = manager_with(CUDAGraphMode.FULL_DECODE_ONLY)
    assert found_by(decodes_only, 1, 40)[:2] == (CUDAGraphMode.FULL, 64)
    assert found_by(decodes_only, 2, 2049)[0] == CUDAGraphMode.NONE


def test_replays_with_prompts_are_counted() -> None:
    manager, found = manager_with()
    graphs = manager._capture_descs[CUDAGraphMode.FULL]
    nothing = SimpleNamespace(replay=lambda: None)
    fake: Any = manager
    fake.graphs = dict.fromkeys(graphs, nothing)
    fake.is_last_pp_rank, fake.use_aux_hidden_state_outputs = True, False
    fake.hidden_states = torch.zeros(2048, 1)
    manager.run_fullgraph(manager.dispatch(4, 4, 1, 0))
    assert found.replayed == 0
    manager.run_fullgraph(manager.dispatch(1, 40, None, 0))
    manager.run_fullgraph(manager.dispatch(12, 65, None, 0))
    assert found.replayed == 2


def test_there_are_graphs_longer_than_those_of_vllm() -> None:
    manager, _ = manager_with()
    whole = CUDAGraphMode.FULL
    assert found_by(manager, 2, 129) == (whole, 192, 12, None)
    assert found_by(manager, 2, 193) == (whole, 256, 12, None)
    assert found_by(manager, 9, 2048) == (whole, 2048, 12, None)
    assert prefill_graphs.longer(512, 8192) == [768, 1024, 1536, 2048]
    assert prefill_graphs.longer(512, 1024) == [768, 1024]
    assert prefill_graphs.longer(512, 900) == [768]
    assert prefill_graphs.longer(512, 512) == []
    assert prefill_graphs.longer(4096, 8192) == []


def test_the_largest_is_captured_first_and_each_once() -> None:
    manager, _ = manager_with(adapters=(0, 2), budget=300)
    graphs = manager._capture_descs[CUDAGraphMode.FULL]
    assert len(set(graphs)) == len(graphs)
    sizes = [graph.num_tokens for graph in graphs]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 256
    of_adapters = defaultdict(list)
    for graph in graphs:
        if graph.uniform_token_count is None:
            of_adapters[graph.num_active_loras].append(graph.num_tokens)
    assert of_adapters[0] == of_adapters[2] == [256, 192, 128, 64, 16]
    assert manager.dispatch(1, 40, None, 2).num_active_loras == 2


def test_there_is_a_graph_for_each_doubling() -> None:
    every = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert prefill_graphs.doublings(every) == [16, 32, 64, 128, 256, 512]
    assert prefill_graphs.doublings([1, 4, 16, 32, 64, 96]) == [16, 32, 96]
    assert prefill_graphs.doublings([1, 2, 4]) == [4]
    assert prefill_graphs.doublings([1]) == []


def test_a_graph_needs_no_more_chunks_than_the_longest_pass() -> None:
    manager, found = manager_with(budget=512)
    assert found.graphs == GraphLimits(12, 512, 8)
    assert found_by(manager, 5, 100)[0] == CUDAGraphMode.PIECEWISE
    # 2 + 2 * 4 chunks; 8 + 2 without a graph
    assert found_by(manager, 4, 100)[:3] == (CUDAGraphMode.FULL, 128, 4)
    assert found_by(manager, 2, 400) == (CUDAGraphMode.NONE, 400, 2, None)
    assert found_by(manager, 1, 400)[:3] == (CUDAGraphMode.FULL, 512, 1)
    _, least = manager_with(budget=128)
    assert least.graphs == GraphLimits(12, 128, 2)
    assert [least.graphs.of(tokens) for tokens in (16, 128)] == [2, 1]


def test_nothing_changes_unless_it_is_wanted() -> None:
    manager, found = manager_with(wants_graphs=False)
    assert found_by(manager, 1, 40)[0] == CUDAGraphMode.PIECEWISE
    assert found.graphs is None


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
)
def test_without_graphs_of_decodes_it_is_refused(mode: CUDAGraphMode) -> None:
    with pytest.raises(ConfigError, match=f"vLLM's mode is {mode.name}: drop"):
        manager_with(mode)


def test_attention_that_cannot_be_captured_is_refused() -> None:
    with pytest.raises(ConfigError, match="and FLASH_ATTN here is not: try"):
        manager_with(support=AttentionCGSupport.UNIFORM_BATCH)


def test_where_nobody_demands_it_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        prefill_graphs.activation.logger,
        "info",
        lambda text, *values: said.append(text % values),
    )
    manager, found = manager_with(wants_graphs=None)
    assert found_by(manager, 1, 40)[0] == CUDAGraphMode.FULL and found.graphs
    manager, found = manager_with(CUDAGraphMode.NONE, wants_graphs=None)
    assert found.graphs is None
    manager, found = manager_with(
        support=AttentionCGSupport.UNIFORM_BATCH, wants_graphs=None
    )
    assert found_by(manager, 1, 40)[0] == CUDAGraphMode.PIECEWISE
    assert found.graphs is None
    assert said[0].startswith("short prefills replay no CUDA graphs: prefill_graphs")
    assert "vLLM's mode is NONE" in said[0] and "FLASH_ATTN here is not" in said[1]


def wanted(
    option: bool | None, found: StateLayers, device: str = "cuda", *, ranks: int = 1
) -> Any:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=None),
        parallel_config=SimpleNamespace(
            data_parallel_size=ranks, decode_context_parallel_size=1
        ),
        use_v2_model_runner=True,
    )
    return prefill_graphs.are_wanted(option, config, found, device)


def test_by_default_layers_replay_graphs_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, found = state_layers()
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: True)
    assert wanted(None, found) is None and wanted(True, found) is True
    assert wanted(False, found) is False
    assert wanted(None, found, "cpu") is False
    assert wanted(None, found, ranks=2) is False and wanted(True, found, ranks=2)
    with pytest.raises(ConfigError, match="is for a GPU"):
        wanted(True, found, "cpu")
    monkeypatch.setattr(kernel_choice, "GRAPHED", {"vllm": frozenset()})
    assert wanted(None, found) is False and wanted(True, found) is True
    found.drafts = 3
    measured = {"vllm": frozenset({Mixer.MAMBA2})}
    monkeypatch.setattr(kernel_choice, "GRAPHED_WITH_DRAFTS", measured)
    assert wanted(None, found) is None
    monkeypatch.setattr(kernel_choice, "GRAPHED_WITH_DRAFTS", {"vllm": frozenset()})
    assert wanted(None, found) is False and wanted(True, found) is True
    monkeypatch.undo()
    monkeypatch.setattr(kernel_choice, "measured_here", lambda: False)
    assert wanted(None, found) is False


def obstacles(found: StateLayers, device: str = "cuda", **changed: Any) -> list[str]:
    settings: dict[str, Any] = {"use_v2_model_runner": True, "pictures": None}
    settings |= changed
    model = SimpleNamespace(multimodal_config=settings.pop("pictures"))
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    config: Any = SimpleNamespace(
        model_config=model, parallel_config=parallel, **settings
    )
    return list(prefill_graphs.obstacles(config, found, device))


def test_each_obstacle_has_a_sentence() -> None:
    _, found = state_layers()
    assert obstacles(found) == []
    (sentence,) = obstacles(found, "cpu")
    assert "is for a GPU" in sentence
    (sentence,) = obstacles(found, use_v2_model_runner=False)
    assert "leave VLLM_USE_V2_MODEL_RUNNER out" in sentence
    text_alone = SimpleNamespace(language_model_only=True)
    assert obstacles(found, pictures=text_alone) == []
    (sentence,) = obstacles(found, pictures=SimpleNamespace(language_model_only=False))
    assert "give --language-model-only" in sentence
    (sentence,) = obstacles(StateLayers({}, "engine", "cuda"))
    assert "vLLM's kernels run the state layers. Set the option" in sentence


def test_linear_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = state_layers()
    monkeypatch.setattr(
        StateLayers, "mixers", property(lambda self: frozenset({Mixer.LIGHTNING}))
    )
    (sentence,) = obstacles(found)
    assert "does not serve linear attention" in sentence


def test_with_drafts_it_serves_layers_that_verify_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, found = state_layers()
    found.drafts = 3
    assert obstacles(found) == []
    both = frozenset({Mixer.GATED_DELTA_NET, Mixer.SHORT_CONV})
    monkeypatch.setattr(StateLayers, "mixers", property(lambda self: both))
    (sentence,) = obstacles(found)
    assert "for gated_delta_net, kda, mamba2, and this model has others" in sentence


def test_a_layer_with_some_of_our_kernels_is_not_enough() -> None:
    layer, found = state_layers()
    kernels = layers.ours(layer)
    assert kernels is not None and found.is_whole
    kernels.phases = frozenset({layers.Phase.PREFILL})
    assert not found.is_whole and len(obstacles(found)) == 1


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU serves it")
def test_a_worker_without_graphs_refuses_it() -> None:
    options = {"prefill_graphs": True, "kernels": "ours"}
    config: Any = SimpleNamespace(
        additional_config={"hybrid_plugin": options},
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
        num_speculative_tokens=0,
        model_config=SimpleNamespace(multimodal_config=None),
    )
    with pytest.raises(ConfigError, match="prefill_graphs is for a GPU; leave it out"):
        take_over(config, {})
