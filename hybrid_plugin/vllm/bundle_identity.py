# SPDX-License-Identifier: Apache-2.0
"""What the model that an engine serves is called on disk and among peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVQuantMode

from hybrid_plugin.engine.bundle_identity import (
    ModelFiles,
    NamesWeights,
    attention_layer,
    in_order,
    model_digest,
    state_layer,
    weights_name,
)
from hybrid_plugin.tiers.identity import Identity
from hybrid_plugin.vllm.bundle_layouts import LATENT, placed_layers
from hybrid_plugin.vllm.planning import HybridKVCacheConfig
from hybrid_plugin.vllm.specs import window_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


def identity_of(
    vllm_config: VllmConfig, config: HybridKVCacheConfig, given: NamesWeights, rank: int
) -> Identity:
    """Name the model, its weights and a rank.

    Args:
        vllm_config: of the engine.
        config: of its pools.
        given: the option that needs it.
        rank: among those with tensor parallelism.

    Raises:
        ConfigError: if the model cannot be told from others.
    """
    model: Any = vllm_config.model_config
    option = given.option
    files = ModelFiles.find(model.model, model.revision, option)
    described = files
    if model.hf_config_path:
        described = ModelFiles.find(model.hf_config_path, option=option)
    load_format = str(vllm_config.load_config.load_format)
    weights = weights_name(given, files, load_format)
    drafter = _drafter(vllm_config, option)
    if drafter is not None:
        weights += f" drafts {weights_name(given, drafter, load_format)}"
    entries, kinds = _kept(config)
    return Identity(
        weights=weights,
        config=model_digest(
            described,
            model.hf_overrides,
            str(model.dtype).removeprefix("torch."),
            model.quantization,
        ),
        layers=in_order(entries),
        kv_dtype=" ".join(sorted(kinds)),
        tensor_rank=rank,
        tensor_ranks=vllm_config.parallel_config.tensor_parallel_size,
    )


def _drafter(vllm_config: VllmConfig, option: str) -> ModelFiles | None:
    """The files of a model that proposes drafts, where it is another one."""
    speculative = vllm_config.speculative_config
    beside: Any = None if speculative is None else speculative.draft_model_config
    if beside is None or beside.model == vllm_config.model_config.model:
        return None
    return ModelFiles.find(beside.model, beside.revision, option)


def _kept(config: HybridKVCacheConfig) -> tuple[list[str], set[str]]:
    """Entries for all layers, and the types of KV among them."""
    entries, kinds = [], set()
    for layers in placed_layers(config).values():
        for layer in layers:
            window = window_of(layer.spec)
            if window is None:
                entries.append(state_layer(layer.label))
                continue
            latent = isinstance(layer.spec, LATENT)
            entries.append(attention_layer(layer.label, window, latent=latent))
            kinds.add(_kv_dtype(layer.spec))
    return entries, kinds


def _kv_dtype(spec: KVCacheSpec) -> str:
    """What vLLM scales by is its own affair: nobody else reads quantised KV."""
    kept: Any = spec
    name = str(kept.dtype).removeprefix("torch.")
    if kept.kv_quant_mode is KVQuantMode.NONE and kept.dtype.itemsize > 1:
        return name
    form = getattr(kept, "cache_dtype_str", None) or kept.kv_quant_mode.name
    return f"{name} as vLLM scales it for {form}"
