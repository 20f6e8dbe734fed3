# SPDX-License-Identifier: Apache-2.0
"""From a model's config.json to its shape."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hybrid_plugin.config import ConfigError
from hybrid_plugin.core.memory.attention_windows import (
    FULL_ATTENTION,
    AttentionWindow,
    ChunkedLocal,
    SlidingWindow,
)
from hybrid_plugin.tools.plan.fields import Fields
from hybrid_plugin.tools.plan.kinds import (
    NEITHER,
    LayerKind,
    has_states_alone,
    layer_kinds,
)
from hybrid_plugin.tools.plan.mixers import Mixer, Widths, attention, state
from hybrid_plugin.tools.plan.shape import AttentionLayers, ModelShape, StateLayers

DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "float8_e4m3fn": 1,
}


_SGLANG_STATES = "float32"
"""What SGLang keeps states in where `mamba_ssm_dtype` says nothing (0.5.23)."""


def load_shape(
    path: Path,
    *,
    ranks: int = 1,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
) -> ModelShape:
    """Read the shape of a model off its config.json.

    Args:
        path: the file, or the folder it lies in.
        ranks: of tensor parallelism; sizes are those of one rank.
        kv_dtype: of KV, instead of the model's own.
        state_dtype: of recurrent states, instead of what the engines choose.

    Raises:
        ConfigError: if it is no model that is understood.
    """
    config = Fields.load(path)
    found = _shape(config, ranks, kv_dtype, state_dtype)
    if state_dtype is not None or not found.states:
        return found
    there = config.text("mamba_ssm_dtype") or _SGLANG_STATES
    in_sglang = _shape(config, ranks, kv_dtype, there)
    if in_sglang.state_bytes == found.state_bytes:
        return found
    return replace(found, in_sglang=in_sglang)


def _shape(
    config: Fields, ranks: int, kv_dtype: str | None, state_dtype: str | None
) -> ModelShape:
    kinds = layer_kinds(config)
    model = dtype_bytes(config.text("dtype") or config.text("torch_dtype", "bfloat16"))
    widths = Widths(
        kv=model if kv_dtype is None else dtype_bytes(kv_dtype),
        conv=model,
        state=_state_width(config, state_dtype, model),
        ranks=ranks,
    )
    attends = attention(config, widths) if any(k.attention for k in kinds) else None
    states = state(config, widths) if any(k.state for k in kinds) else None
    if attends is None and states is None:
        raise ConfigError(f"{config.source}: the model has no layers to cache for.")
    for mixer in (attends, states):
        if mixer is not None and not mixer.bytes:
            raise ConfigError(
                f"{config.source}: by its sizes, {mixer.kind} would hold nothing "
                f"({mixer.formula})."
            )
    mixers, active = _mixer_weights(kinds, attends, states)
    feeding = 0 if has_states_alone(config) else _feed_layers(kinds)
    feed, active_feed = _feed_forward(config, feeding, ranks)
    embedding = config.integer("vocab_size", default=0) * config.integer("hidden_size")
    return ModelShape(
        name=config.text("model_type") or "model",
        layers=len(kinds),
        attention=_attention_groups(config, kinds, attends),
        states=_state_groups(kinds, states),
        parameters=mixers + feed + 2 * embedding / ranks,
        active_parameters=active + active_feed + embedding / ranks,
        weight_bytes=model,
    )


def dtype_bytes(name: str) -> int:
    """Bytes of one number.

    Raises:
        ConfigError: for a type that is not known.
    """
    size = DTYPE_BYTES.get(name.removeprefix("torch."))
    if size is None:
        raise ConfigError(
            f"The number type {name!r:.40} is unknown; known are "
            f"{', '.join(sorted(DTYPE_BYTES))}."
        )
    return size


def stored_weight_bytes(path: Path) -> int | None:
    """Bytes of a checkpoint's weights, from its index; None if it has none."""
    folder = path if path.is_dir() else path.parent
    index = folder / "model.safetensors.index.json"
    try:
        size = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        single = folder / "model.safetensors"
        return single.stat().st_size if single.is_file() else None
    return size if isinstance(size, int) else None


def _state_width(config: Fields, wanted: str | None, model: int) -> int:
    if wanted is not None:
        return dtype_bytes(wanted)
    for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if config.text(name):
            return dtype_bytes(config.text(name))
    # Kimi's delta attention keeps its states in full precision.
    delta = "linear_attn_config" in config or "linear_num_heads" in config
    return 4 if delta else model


def _span(config: Fields, kind: str) -> AttentionWindow:
    if kind == "sliding":
        return SlidingWindow(max(config.integer("sliding_window"), 1))
    if kind == "chunked":
        return ChunkedLocal(max(config.integer("attention_chunk_size"), 1))
    return FULL_ATTENTION


def _attention_groups(
    config: Fields, kinds: list[LayerKind], mixer: Mixer | None
) -> tuple[AttentionLayers, ...]:
    counts = Counter(kind.attention for kind in kinds if kind.attention)
    if mixer is None:
        return ()
    return tuple(
        AttentionLayers(
            count, _span(config, name), mixer.bytes, mixer.pair_flops, mixer.formula
        )
        for name, count in sorted(counts.items())
    )


def _state_groups(
    kinds: list[LayerKind], mixer: Mixer | None
) -> tuple[StateLayers, ...]:
    if mixer is None:
        return ()
    count = sum(kind.state for kind in kinds)
    return (
        StateLayers(count, mixer.kind, mixer.bytes, mixer.formula, mixer.record_bytes),
    )


def _mixer_weights(
    kinds: list[LayerKind], attends: Mixer | None, states: Mixer | None
) -> tuple[float, float]:
    total = 0.0
    for kind in kinds:
        if kind.attention and attends is not None:
            total += attends.parameters
        if kind.state and states is not None:
            total += states.parameters
    return total, total


def _feed_layers(kinds: list[LayerKind]) -> int:
    """Layers with a feed-forward network: all, unless some have nothing else."""
    return sum(kind == NEITHER for kind in kinds) or len(kinds)


def _feed_forward(config: Fields, layers: int, ranks: int) -> tuple[float, float]:
    """Weights of all feed-forward networks: all of them, and those of one token."""
    hidden = config.integer("hidden_size")
    widths = config.integers_or_one("intermediate_size")
    dense = 3.0 * hidden * max(widths, default=0)
    experts = config.integer(
        "num_experts", "num_local_experts", "n_routed_experts", default=0
    )
    sparse = layers // config.integer("expert_layer_period", default=1) or layers
    if experts <= 1:
        return layers * dense / ranks, layers * dense / ranks
    inner = config.integer("moe_intermediate_size", default=max(widths, default=0))
    shared = config.integer(
        "shared_expert_intermediate_size", "shared_intermediate_size", default=0
    )
    one, always = 3.0 * hidden * inner, 3.0 * hidden * shared
    chosen = config.integer("num_experts_per_tok", "num_experts_per_token", default=1)
    rest = (layers - sparse) * dense
    total = sparse * (experts * one + always) + rest
    return total / ranks, (sparse * (chosen * one + always) + rest) / ranks
