# SPDX-License-Identifier: Apache-2.0
"""What SGLang and the plugin would do with a model, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.core.memory.elastic_plan import ElasticPlan
from hybrid_plugin.core.memory.layout import AttentionGroup, CacheLayout, StateGroup
from hybrid_plugin.engine import elastic_memory
from hybrid_plugin.engine.elastic_memory import limited
from hybrid_plugin.engine.outlook import Outlook, Prospect
from hybrid_plugin.sglang.activation import FLAG, read_options


def foresee(model: str, flags: Sequence[str], cache_bytes: int) -> Outlook:
    """Resolve a server's arguments as SGLang does, and lay its cache out.

    Args:
        model: a folder with a config.json, or a name SGLang takes.
        flags: of `sglang.launch_server`; the plugin's own is added.
        cache_bytes: of both pools together, on one rank.
    """
    try:
        server_args = _resolve(model, flags)
    except (Exception, SystemExit) as error:
        text = str(error) or repr(error)
        ours = text.startswith("hybrid-plugin")
        return Outlook(Prospect.REFUSED if ours else Prospect.FAILS, text)
    unknown = _unknown_architecture(server_args)
    if unknown is not None:
        return Outlook(Prospect.FAILS, unknown)
    view = _view(server_args)
    if view.radix_cache_backend != "hybrid":
        return Outlook(
            Prospect.LEFT_ALONE,
            "the model has no state layers beside its attention layers, or SGLang "
            "caches nothing of it",
        )
    if view.tp_size > 1:
        note = "sizes are worked out for one rank; leave --tp-size out"
        return Outlook(Prospect.SERVED, note=note)
    try:
        return _sized(server_args, view.page_size, cache_bytes)
    except Exception as error:
        note = f"SGLang could not describe the model ({error!r})"
        return Outlook(Prospect.SERVED, note=note)


def _resolve(model: str, flags: Sequence[str]) -> Any:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(["--model-path", model, FLAG, *flags])
    server_args.resolve_once()
    publish(server_args, role="scheduler")
    return server_args


def _unknown_architecture(server_args: Any) -> str | None:
    """What SGLang says of a model that it has no class for; None for one it serves.

    It says so itself only once it loads the model.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.registry import ModelRegistry

    names = ModelConfig.from_server_args(server_args).hf_config.architectures
    try:
        ModelRegistry.resolve_model_cls(names)
    except ValueError as error:
        return f"SGLang cannot load this model: {str(error).partition('. ')[0]}."
    return None


def _view(server_args: Any) -> Any:
    from sglang.srt.arg_groups import overrides

    return overrides.resolved_view(server_args)


def _sized(server_args: Any, page_size: int, cache_bytes: int) -> Outlook:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig

    model = ModelConfig.from_server_args(server_args)
    hybrid = mambaish_config(model)
    layout = CacheLayout(
        page_size=page_size,
        attention=(
            AttentionGroup(
                tuple(map(str, hybrid.full_attention_layer_ids)),
                _token_bytes(model) * page_size,
            ),
        ),
        states=(_states(hybrid.mamba2_cache_params),),
        slot_alignment=1,
    )
    options, longest = read_options(), model.context_len
    try:
        shared = _shared(model, hybrid, page_size, cache_bytes, options)
        if shared is not None:
            return Outlook(
                Prospect.SERVED,
                layout=shared.layout,
                sizes=shared.sizes,
                shared=shared,
                max_model_len=longest,
            )
        sizes = layout.split(
            limited(cache_bytes, options),
            max_model_len=longest,
            state_memory_ratio=options.state_memory_ratio,
        )
    except ValueError as error:
        return Outlook(
            Prospect.REFUSED, str(error), layout=layout, max_model_len=longest
        )
    return Outlook(Prospect.SERVED, layout=layout, sizes=sizes, max_model_len=longest)


def _shared(
    model: Any, hybrid: Any, page_size: int, cache_bytes: int, options: HybridConfig
) -> ElasticPlan | None:
    """How the pools share the memory, if they do."""
    import torch

    from hybrid_plugin.sglang import elastic
    from hybrid_plugin.sglang.log import logger

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if not elastic_memory.is_wanted(options, elastic.hindrance(device_type)):
        return None
    budget = limited(cache_bytes, options)
    per_layer = 1 if _is_latent(model) else 2
    return elastic_memory.plan(
        elastic.layout_of(
            hybrid.mamba2_cache_params,
            tensors=per_layer * len(hybrid.full_attention_layer_ids),
            tensor_bytes=_token_bytes(model) // per_layer,
            page_size=page_size,
        ),
        budget,
        options,
        block_bytes=elastic_memory.block_bytes(budget, device_type),
        max_model_len=model.context_len,
        max_sequences=elastic.MOST_SEQUENCES,
        log=logger,
    )


def _states(params: Any) -> StateGroup:
    layers = tuple(map(str, params.layers))
    return StateGroup(layers, params.mamba_cache_per_req // len(layers))


def _token_bytes(model: Any) -> int:
    """KV of one token in one attention layer, for unquantised caches."""
    if _is_latent(model):
        elements = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        elements = model.get_num_kv_heads(1) * (model.head_dim + model.v_head_dim)
    return int(elements * model.dtype.itemsize)


def _is_latent(model: Any) -> bool:
    """Whether a layer keeps one tensor, and not keys and values."""
    from sglang.srt.configs.model_config import AttentionArch

    return bool(model.attention_arch == AttentionArch.MLA)
