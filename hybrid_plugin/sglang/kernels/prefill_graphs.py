# SPDX-License-Identifier: Apache-2.0
"""Our kernels in SGLang's CUDA graphs of short prefills, where `prefill_graphs` asks.

SGLang captures a graph for each of several numbers of tokens, and breaks it where a
layer must run eagerly.  A backend of linear attention may say that its layers need not:
then it gives metadata for the graph when that is captured, and fills the same metadata
anew before each replay.  Batches that fit no graph run as without.

It can also capture the whole model, if attention can (FlashAttention, FlashInfer); then
the backend prepares a pass as it does for decodes, padded to the graph's sequences too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
from sglang.srt.runtime_context import get_spec

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.engine.kernel_choice import Mixer, Phase
from hybrid_plugin.mixers.fixed_prefills import FixedPrefills
from hybrid_plugin.sglang.kernels import passes
from hybrid_plugin.sglang.kernels.state_layers import StateLayers

_MIXERS = {GDNAttnBackend: Mixer.GATED_DELTA_NET, KDAAttnBackend: Mixer.KDA}
"""Whose layers SGLang lets into its graphs, if their backend says so."""
_WHOLE: WeakKeyDictionary[Any, dict[int, GraphMetadata]] = WeakKeyDictionary()
"""Of the graphs without breaks, by backend and tokens."""


@dataclass(kw_only=True)
class GraphMetadata(ForwardMetadata):
    """What SGLang's backend holds while a graph with our kernels is the pass.

    Eager passes and decodes put other metadata in its place.
    """

    fixed: FixedPrefills


def are_wanted(options: HybridConfig, configurator: Any) -> bool | None:
    """Whether layers are to be in graphs of prefills, for `StateLayers.settle`.

    With data-parallel attention, whose ranks share passes, graphs were not tried, and
    with drafts they were timed and no answers compared: an option has to demand them.

    Args:
        options: of the plugin.
        configurator: SGLang's `KVCacheConfigurator`.
    """
    wanted = options.wants_prefill_graphs
    drafts = get_spec().speculative_algorithm is not None
    if wanted is None and (drafts or configurator.attn_dp_size > 1):
        return False
    return wanted


def bound(result: None, backend: Any, *_: Any, **__: Any) -> None:
    """Hook after `GDNAttnBackend.__init__`: sequences of a graph, as SGLang has them.

    Its other backend of linear attention that can be captured reads the same variable.
    """
    backend.prefill_graph_max_seqs = envs.SGLANG_KDA_PREFILL_GRAPH_MAX_SEQS.get()


def are_supported(
    layers: StateLayers, original: Callable[..., bool], backend: Any
) -> bool:
    """Hook of `supports_prefill_graph_extend`."""
    if _is_ours(layers, backend):
        return layers.in_prefill_graphs
    return original(backend)


def are_active(
    layers: StateLayers, original: Callable[..., bool], backend: Any
) -> bool:
    """Hook of `prefill_graph_extend_active`."""
    if _is_ours(layers, backend):
        return isinstance(backend.forward_metadata, GraphMetadata)
    return original(backend)


def begin(
    layers: StateLayers, original: Callable[..., Any], backend: Any, batch: Any
) -> Any:
    """Hook of `init_prefill_graph_metadata`: a graph is about to be captured.

    Args:
        layers: who runs them.
        original: SGLang's method.
        backend: whose method it is.
        batch: as many tokens as the graph has, in few sequences without slots.

    Returns:
        What SGLang gives back before each replay.
    """
    if not _is_ours(layers, backend):
        return original(backend, batch)
    tokens = batch.extend_num_tokens
    most = min(tokens, backend.prefill_graph_max_seqs)
    return _captured(layers, backend, batch, tokens, most)


def refresh(
    layers: StateLayers,
    original: Callable[..., None],
    backend: Any,
    meta: Any,
    forward_batch: Any,
) -> None:
    """Hook of `refresh_prefill_graph_metadata`: a graph is about to be replayed.

    Args:
        layers: who runs them.
        original: SGLang's method.
        backend: whose method it is.
        meta: what `begin` returned for the graph.
        forward_batch: the pass, without padding.
    """
    if _is_ours(layers, backend):
        _fill(layers, backend, meta, forward_batch)
    else:
        original(backend, meta, forward_batch)


def prepare_whole(
    layers: StateLayers,
    original: Callable[..., None],
    backend: Any,
    forward_batch: Any,
    in_capture: bool = False,
) -> None:
    """Hook of `HybridLinearAttnBackend.init_forward_metadata_out_graph`.

    Args:
        layers: who runs them.
        original: SGLang's method.
        backend: whose method it is.
        forward_batch: the pass, padded to the graph's tokens and sequences.
        in_capture: whether the graph is about to be captured, not replayed.
    """
    linear = backend.linear_attn_backend
    if not (
        layers.in_prefill_graphs
        and _is_ours(layers, linear)
        and backend._is_plain_extend(forward_batch)
    ):
        original(backend, forward_batch, in_capture=in_capture)
        return
    attention = backend.full_attn_backend
    attention.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
    graphs = _WHOLE.setdefault(linear, {})
    tokens = len(forward_batch.input_ids)
    if in_capture:
        most = forward_batch.batch_size
        graphs[tokens] = _captured(layers, linear, forward_batch, tokens, most)
    else:
        _fill(layers, linear, graphs[tokens], forward_batch)


def clear_padding(out: torch.Tensor, metadata: Any) -> None:
    """Zero what a graph computed for rows behind the sequences.

    Experts and norms that follow take padding too, which must be finite.

    Args:
        out: ``[1, T, HV, V]``, of a layer.
        metadata: of the pass; one without a graph has no such rows in `out`.
    """
    if isinstance(metadata, GraphMetadata):
        padding = metadata.fixed.padding[: out.shape[1]]
        out.masked_fill_(padding[None, :, None, None], 0)


def _captured(
    layers: StateLayers, backend: Any, batch: Any, tokens: int, sequences: int
) -> GraphMetadata:
    """Of a new graph; warm-up and capture run `batch` and leave all states alone."""
    fixed = FixedPrefills(
        tokens,
        sequences,
        torch.device(backend.device),
        round_states=layers.round_states,
    )
    slots = torch.full_like(fixed.prefills.slots[: batch.batch_size], -1)
    fixed.fill(batch.extend_seq_lens, batch.extend_prefix_lens, slots, None)
    metadata = GraphMetadata(
        query_start_loc=fixed.prefills.cu_seqlens,
        mamba_cache_indices=fixed.prefills.slots,
        fixed=fixed,
    )
    passes.keep(metadata, fixed.prefills)
    backend.forward_metadata = metadata
    return metadata


def _fill(
    layers: StateLayers, backend: Any, metadata: GraphMetadata, batch: Any
) -> None:
    """Describe a pass to its graph, states that it is to keep among it."""
    count = batch.batch_size
    rows = backend.req_to_token_pool.get_mamba_indices(batch.req_pool_indices[:count])
    slots = passes.named(backend._translate_mamba_indices(rows))
    interior = layers.interior
    metadata.fixed.fill(
        batch.extend_seq_lens[:count],
        batch.extend_prefix_lens[:count],
        slots,
        None if interior is None else interior.rows(slots),
    )
    backend.forward_metadata = metadata


def _is_ours(layers: StateLayers, backend: Any) -> bool:
    mixer = _MIXERS.get(type(backend))
    return mixer is not None and layers.runs(mixer, Phase.PREFILL)
