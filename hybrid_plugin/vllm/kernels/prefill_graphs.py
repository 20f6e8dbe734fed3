# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the whole model for passes with prefills: the option `prefill_graphs`.

vLLM captures such graphs only where every backend of attention and state layers says
that its prefills can be captured, and then none for decodes alone.  Here both kinds are
captured, beside vLLM's own graphs of pieces, which run what fits no graph of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.commands import CHUNK
from hybrid_plugin.engine.kernel_choice import Mixer, are_graphed
from hybrid_plugin.vllm import activation, context_parallel
from hybrid_plugin.vllm.kernels import graph_times, layers
from hybrid_plugin.vllm.kernels.fixed_shape import GraphLimits
from hybrid_plugin.vllm.kernels.layers import StateLayers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


TILE = 16
"""Rows of the least product of matrices that a GPU computes at a time."""
LONGEST = 2048
"""Tokens of the largest graph.  On an H100, of the models that were measured, such a
pass computes for about as long as the host needs to launch one."""


def obstacles(
    vllm_config: VllmConfig, found: StateLayers, device_type: str
) -> Iterator[str]:
    """Sentences about what of a loaded model keeps prefills out of graphs.

    Args:
        vllm_config: of its worker.
        found: its state layers.
        device_type: "cpu" or "cuda", as torch calls it.
    """
    if device_type == "cpu":
        yield "prefill_graphs is for a GPU; leave it out."
    elif not vllm_config.use_v2_model_runner:
        yield (
            "prefill_graphs needs vLLM's second model runner; leave "
            "VLLM_USE_V2_MODEL_RUNNER out."
        )
    if context_parallel.page_ranks(vllm_config) > 1:
        yield (
            "prefill_graphs was not tested with decode context parallelism; leave it "
            "out, or drop --decode-context-parallel-size."
        )
    if found.drafts and not found.mixers <= layers.RECORDED:
        yield (
            "prefill_graphs is served with speculative decoding for "
            f"{', '.join(sorted(layers.RECORDED))}, and this model has others; drop "
            "--speculative-config, or leave it out."
        )
    if not found.is_whole:
        yield (
            "prefill_graphs needs our kernels in all state layers, for prefills and "
            f'decodes: {found.describe()} Set the option "kernels" to "ours".'
        )
    if Mixer.LIGHTNING in found.mixers:
        yield (
            "prefill_graphs does not serve linear attention, whose layers clear states "
            "by a decision that a graph would repeat; leave it out."
        )
    if found.uncaptured is not None:
        yield (
            f"prefill_graphs needs state layers that a CUDA graph can hold, and "
            f"{found.uncaptured} is none; leave it out."
        )
    pictures = vllm_config.model_config.multimodal_config
    if pictures is not None and not pictures.language_model_only:
        yield (
            "prefill_graphs serves text alone; give --language-model-only, or leave it "
            "out."
        )


def are_wanted(
    wanted: bool | None, vllm_config: VllmConfig, found: StateLayers, device_type: str
) -> bool | None:
    """Whether passes with prefills are to replay graphs, as far as the layers go.

    Args:
        wanted: `wants_prefill_graphs` of `HybridConfig`.
        vllm_config: of the worker.
        found: its state layers.
        device_type: "cpu" or "cuda", as torch calls it.

    Returns:
        As `StateLayers.wants_graphs`: None if no option says so, and nothing known yet
        stands in the way.

    Raises:
        ConfigError: if the option demands them, and something stands in the way.
    """
    if wanted is False:
        return False
    obstacle = next(obstacles(vllm_config, found, device_type), None)
    if obstacle is None:
        # Data-parallel ranks agree on a graph for each pass: that was not tried.
        ranks = vllm_config.parallel_config.data_parallel_size
        by_default = ranks == 1 and are_graphed(
            "vllm", found.mixers, drafts=found.drafts > 0
        )
        return wanted or (None if by_default else False)
    if wanted:
        raise ConfigError(obstacle)
    return False


def add(manager: Any) -> None:
    """Have vLLM capture graphs for passes with prefills, and find them.

    Where no option demands them, what vLLM cannot capture is said in the log.

    Args:
        manager: vLLM's `ModelCudaGraphManager`, with its own graphs' descriptions.

    Raises:
        ConfigError: if the option demands them, and vLLM captures no graphs of
            decodes, or its attention cannot be captured beside a prefill.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    found = layers.all_of(manager.vllm_config)
    if found is None or found.wants_graphs is False:
        return
    missing = _missing(manager)
    if missing is not None:
        if found.wants_graphs:
            raise ConfigError(missing)
        activation.logger.info("short prefills replay no CUDA graphs: %s", missing)
        return
    sizes = sorted(manager.compilation_config.cudagraph_capture_sizes)
    budget = manager.vllm_config.scheduler_config.max_num_batched_tokens
    wanted = doublings(sizes)
    wanted += longer(sizes[-1], budget)
    limits = limits_of(manager.vllm_config, wanted[-1], 1 + found.drafts)
    captured = manager._capture_descs.setdefault(CUDAGraphMode.FULL, [])
    smallest = 0
    for size in wanted:
        sequences = limits.rows(size)
        if not sequences:
            continue
        for adapters in manager.lora_capture_cases:
            graph = BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=size,
                num_reqs=sequences,
                num_active_loras=adapters,
            )
            captured.append(graph)
            for tokens in range(smallest, size + 1):
                candidates = manager._candidates.setdefault((tokens, adapters), [])
                whole = [c for c in candidates if c.cg_mode == CUDAGraphMode.FULL]
                candidates.insert(len(whole), graph)
        smallest = size + 1
    # vLLM estimates the memory of all by that of the first, the largest.
    captured.sort(key=lambda graph: graph.num_tokens, reverse=True)
    found.limit_graphs(limits)


def find(
    original: Callable[..., Any],
    manager: Any,
    sequences: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Find the graph of a pass: none with prefills where its replay takes too long.

    Args:
        original: of vLLM, which finds any that has room.
        manager: its `CudaGraphManager`.
        sequences: of the pass.
        args: what else vLLM tells of it.
        kwargs: the same by name.
    """
    graph = original(manager, sequences, *args, **kwargs)
    fits: graph_times.Fits | None = getattr(manager, graph_times.FITS, None)
    if fits is None or sequences <= fits.sequences.get(graph, sequences):
        return graph
    every, manager._candidates = manager._candidates, fits.others
    try:
        return original(manager, sequences, *args, **kwargs)
    finally:
        manager._candidates = every


def count(manager: Any, graph: Any) -> None:
    """Count a graph that is about to be replayed, if it is one with prefills.

    Args:
        manager: vLLM's `ModelCudaGraphManager`.
        graph: its description.

    Raises:
        RuntimeError: if its pass was not described as one of this graph's, whose
            sequences it would not find.
    """
    found = layers.all_of(manager.vllm_config)
    if found is None or found.graphs is None:
        return
    if found.graphs.hold(graph.num_reqs, graph.num_tokens):
        described = [tables.rows for tables in found.tables]
        if described and graph.num_reqs not in described:
            raise RuntimeError(
                f"a CUDA graph with prefills for {graph.num_tokens} tokens is replayed "
                "for a pass that was described as another; set prefill_graphs to false "
                "and report this."
            )
        found.replayed += 1


def doublings(sizes: Sequence[int]) -> list[int]:
    """The sizes of graphs with prefills, rising: one for each doubling, from `TILE` on.

    Each holds all kernels of the model, whatever its size, and takes memory and time to
    capture.  Padding costs little: passes this short read weights for longer than they
    compute with them, and products of fewer rows than a tile take as long as one tile.

    Args:
        sizes: tokens of the graphs that vLLM captures, rising.
    """
    found: list[int] = []
    for size in reversed(sizes):
        if size > 1 and (not found or (size >= TILE and 2 * size <= found[-1])):
            found.append(size)
    return found[::-1]


def longer(largest: int, budget: int) -> list[int]:
    """Sizes of graphs behind vLLM's, rising by a half or a third: padding computes.

    Whether each is of use turns out when it is captured (`graph_times`).

    Args:
        largest: tokens of vLLM's largest graph.
        budget: tokens of a pass at most.
    """
    found, size = [], largest
    while size < min(budget, LONGEST):
        found += [one for one in (size * 3 // 2, 2 * size) if one <= LONGEST]
        size *= 2
    return [size for size in found if size <= budget]


def limits_of(vllm_config: VllmConfig, tokens: int, width: int = 1) -> GraphLimits:
    """What graphs have room for.

    Args:
        vllm_config: of the engine.
        tokens: of the largest graph.
        width: as in `GraphLimits`.
    """
    scheduling = vllm_config.scheduler_config
    chunks = scheduling.max_num_batched_tokens // CHUNK
    return GraphLimits(scheduling.max_num_seqs, tokens, chunks, width)


def _missing(manager: Any) -> str | None:
    """A sentence about what vLLM does not capture; None if it captures all.

    Args:
        manager: as in `add`.
    """
    from vllm.config.compilation import CUDAGraphMode

    if _drafts_vary(manager):
        return (
            "prefill_graphs needs one number of drafts in all graphs, which tells them "
            "from prefills: drop num_speculative_tokens_per_batch_size or adaptive "
            "verification, or the option."
        )
    mode = manager.cudagraph_mode
    if not (mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL):
        return (
            f"prefill_graphs needs CUDA graphs of decodes, and vLLM's mode is "
            f"{mode.name}: drop --enforce-eager and cudagraph_mode, or the option."
        )
    backend = _uncaptured_attention(manager.vllm_config)
    if backend is None:
        return None
    return (
        f"prefill_graphs needs attention that a CUDA graph can hold beside a prefill, "
        f"and {backend} here is not: try --attention-backend TRITON_ATTN, or leave the "
        "option out."
    )


def _drafts_vary(manager: Any) -> bool:
    """Whether vLLM's graphs verify different numbers of drafts."""
    drafting = manager.vllm_config.speculative_config
    if drafting is None:
        return False
    return bool(manager.varlen_decode or drafting.uses_dynamic_speculative_decoding())


def _uncaptured_attention(vllm_config: VllmConfig) -> str | None:
    """The first backend that is not ours and is not captured beside prefills."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionCGSupport

    for layer in vllm_config.compilation_config.static_forward_context.values():
        if not isinstance(layer, AttentionLayerBase) or layers.ours(layer) is not None:
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None:  # it reads what another layer keeps, with the same backend
            continue
        backend = layer.get_attn_backend()
        support = backend.get_builder_cls().get_cudagraph_support(vllm_config, spec)
        if support != AttentionCGSupport.ALWAYS:
            return str(backend.get_name())
    return None
