# SPDX-License-Identifier: Apache-2.0
"""What the model that a rank serves is called on disk, and how its pools lie there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs import hybrid_arch
from sglang.srt.runtime_context import get_parallel

from hybrid_plugin.core.commands import Pool, PoolId
from hybrid_plugin.core.memory.attention_windows import FULL_ATTENTION, AttentionWindow
from hybrid_plugin.engine.bundle_identity import (
    ModelFiles,
    NamesWeights,
    attention_layer,
    in_order,
    model_digest,
    state_layer,
    weights_name,
)
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.sglang import bundle_layouts
from hybrid_plugin.sglang.bundle_layouts import NamedRows
from hybrid_plugin.sglang.compressed_keys import key_tensors
from hybrid_plugin.sglang.kernels.choice import mixer_of
from hybrid_plugin.sglang.layout import is_latent
from hybrid_plugin.sglang.pending_keys import pending_tensors
from hybrid_plugin.sglang.rings import ring_tensors
from hybrid_plugin.tiers.identity import Identity

_STATE_AXES: Mapping[Mixer, tuple[str, str, str]] = {
    Mixer.GATED_DELTA_NET: ("head", "value", "key"),
    Mixer.KDA: ("head", "value", "key"),
    Mixer.MAMBA2: ("head", "channel", "state"),
    Mixer.LIGHTNING: ("head", "key", "value"),
}
"""Axes of a state, by the kind of its layers."""


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """What the pools of a rank keep of which layers."""

    named: Mapping[PoolId, Sequence[NamedRows] | str]
    """As for `bundle_layouts.layouts`."""
    layers: tuple[str, ...]
    """`Identity.layers`."""
    kv_dtype: str
    """`Identity.kv_dtype`."""


def kept_layers(
    model: Any,
    kv_pool: Any,
    state_pool: Any | None,
    page_size: int,
    window: AttentionWindow | None = None,
    drafts: Sequence[Any] = (),
) -> KeptLayers:
    """Name what lies in the pools.

    Args:
        model: SGLang's `ModelConfig`.
        kv_pool: its `HybridLinearKVPool`, or `SWAKVPool`.
        state_pool: its `MambaPool`; None for the latter.
        page_size: tokens in a page.
        window: of the latter's window layers.
        drafts: KV pools of draft models, whose pages are those of the model.
    """
    latent = is_latent(model)
    named: dict[PoolId, Sequence[NamedRows] | str] = {}
    full, behind = _layers_of(kv_pool)
    layers = [attention_layer(one, FULL_ATTENTION, latent=latent) for one in full]
    named[Pool.KV] = _joined(
        bundle_layouts.key_value_rows(kv_pool.full_kv_pool, page_size, full),
        bundle_layouts.compressed_rows(key_tensors(kv_pool)),
    )
    if window is not None:
        layers += [attention_layer(one, window, latent=latent) for one in behind]
        named[Pool.window(0)] = bundle_layouts.key_value_rows(
            kv_pool.swa_kv_pool, page_size, behind
        )
    for number, pool in enumerate(drafts):
        labels = [f"draft {number}.{layer}" for layer in range(pool.layer_num)]
        layers += [attention_layer(one, FULL_ATTENTION) for one in labels]
        rows = bundle_layouts.key_value_rows(pool, page_size, labels)
        named[Pool.KV] = _joined(named[Pool.KV], rows)
    if state_pool is not None:
        layers += [state_layer(str(layer)) for layer in state_pool.mamba_layer_ids]
        taps_first = getattr(_shape_of(model), "conv_slice_axis", 0) == 1
        named[Pool.STATE] = bundle_layouts.state_rows(
            state_pool, taps_first, _state_axes(model), _rings(kv_pool, drafts)
        )
    return KeptLayers(named, in_order(layers), _kv_dtype(kv_pool.dtype))


def identity_of(
    model: Any, server_args: Any, given: NamesWeights, kept: KeptLayers
) -> Identity:
    """Name the model, its weights and this rank.

    Args:
        model: SGLang's `ModelConfig`.
        server_args: its `ServerArgs`.
        given: the option that needs it.
        kept: of this rank.

    Raises:
        ConfigError: if the model cannot be told from others.
    """
    option = given.option
    files = ModelFiles.find(server_args.model_path, server_args.revision, option)
    weights = weights_name(given, files, server_args.load_format)
    drafts = server_args.speculative_draft_model_path
    if any(layer.startswith("draft ") for layer in kept.layers) and drafts:
        beside = ModelFiles.find(drafts, server_args.speculative_draft_model_revision)
        load_format = server_args.speculative_draft_load_format or "auto"
        weights += f" drafts {weights_name(given, beside, load_format)}"
    return Identity(
        weights=weights,
        config=model_digest(
            files,
            model.model_override_args,
            str(model.dtype).removeprefix("torch."),
            model.quantization,
        ),
        layers=kept.layers,
        kv_dtype=kept.kv_dtype,
        tensor_rank=get_parallel().tp_rank,
        tensor_ranks=get_parallel().tp_size,
    )


def _layers_of(kv_pool: Any) -> tuple[list[str], list[str]]:
    """Labels of the layers with full attention, and of those with windows."""
    places = getattr(kv_pool, "layers_mapping", None)
    if places is None:
        return [str(one) for one in kv_pool.full_attention_layer_id_mapping], []
    return (
        [str(one) for one, (_, is_window) in places.items() if not is_window],
        [str(one) for one, (_, is_window) in places.items() if is_window],
    )


def _joined(
    pages: Sequence[NamedRows] | str, more: Sequence[NamedRows] | str
) -> Sequence[NamedRows] | str:
    if isinstance(pages, str) or isinstance(more, str):
        return f"{pages}; {more}"
    return [*pages, *more]


def _rings(kv_pool: Any, drafts: Sequence[Any]) -> list[torch.Tensor]:
    """Of tokens without an index key, which lie behind the states."""
    full = getattr(kv_pool, "full_kv_pool", kv_pool)
    own = [*ring_tensors(full), *pending_tensors(kv_pool)]
    return [*own, *(ring for pool in drafts for ring in ring_tensors(pool))]


def _shape_of(model: Any) -> Any:
    """SGLang's shapes of a layer's states."""
    return hybrid_arch.mambaish_config(model).mamba2_cache_params.shape


def _state_axes(model: Any) -> tuple[str, str, str] | None:
    """Axes of the model's states; None for a kind that nobody can name."""
    mixer = mixer_of(model)
    return None if mixer is None else _STATE_AXES.get(mixer)


def _kv_dtype(dtype: torch.dtype) -> str:
    """What SGLang scales by is its own affair: nobody else reads quantised KV."""
    name = str(dtype).removeprefix("torch.")
    return name if dtype.itemsize > 1 else f"{name} as SGLang scales it"
