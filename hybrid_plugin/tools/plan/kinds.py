# SPDX-License-Identifier: Apache-2.0
"""Which mixer each layer of a model has.

Recent configurations name the kind of every layer; older ones, which many
published checkpoints keep, describe a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.config import ConfigError
from hybrid_plugin.tools.plan.fields import Fields

MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer has besides its feed-forward network."""

    attention: str | None = None
    """`full`, `sliding` or `chunked`."""
    state: bool = False


FULL = LayerKind("full")
STATE = LayerKind(state=True)
BOTH = LayerKind("full", state=True)
NEITHER = LayerKind()

_NAMES = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": LayerKind("sliding"),
    "chunked_attention": LayerKind("chunked"),
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "conv": STATE,
    "hybrid": BOTH,
    "moe": NEITHER,
    "mlp": NEITHER,
}
_LETTERS = {"M": STATE, "*": FULL, "-": NEITHER, "E": NEITHER}
"""Of Nemotron-H's pattern."""
_PURE = {"mamba", "mamba2", "falcon_mamba"}
_STATES_BESIDE_ATTENTION = {"falcon_h1"}


def has_states_alone(config: Fields) -> bool:
    """Whether a model's layers are state layers and nothing else, as Mamba's are."""
    return config.text("model_type") in _PURE


def layer_kinds(config: Fields) -> list[LayerKind]:
    """The kind of every layer, those that own no KV of their own left out.

    Raises:
        ConfigError: for a pattern that is not understood.
    """
    kinds = _named(config) or _from_letters(config) or _from_numbers(config)
    if len(kinds) > MOST_LAYERS:
        raise ConfigError(f"{config.source}: {len(kinds)} layers are too many.")
    return _without_sharing(kinds, config.integer("num_kv_shared_layers", default=0))


def _named(config: Fields) -> list[LayerKind] | None:
    names = config.strings("layer_types") or config.strings("layers_block_type")
    if names is None:
        return None
    for name in names:
        if name not in _NAMES:
            raise ConfigError(
                f"{config.source}: layers of the kind {name!r:.40} are unknown; known "
                f"are {', '.join(sorted(_NAMES))}."
            )
    return [_NAMES[name] for name in names]


def _from_letters(config: Fields) -> list[LayerKind] | None:
    pattern = config.text("hybrid_override_pattern")
    if not pattern:
        return None
    for letter in pattern:
        if letter not in _LETTERS:
            raise ConfigError(
                f"{config.source}: {letter!r} in hybrid_override_pattern is unknown."
            )
    return [_LETTERS[letter] for letter in pattern]


def _from_numbers(config: Fields) -> list[LayerKind]:
    count = config.integer("num_hidden_layers", "n_layer", "num_layers")
    if count > MOST_LAYERS:
        raise ConfigError(f"{config.source}: {count} layers are too many.")
    if has_states_alone(config):
        return [STATE] * count
    if config.text("model_type") in _STATES_BESIDE_ATTENTION:
        return [BOTH] * count
    attention = _attention_layers(config, count)
    if attention is None:
        sliding = config.integer("sliding_window", default=0)
        return [LayerKind("sliding") if sliding else FULL] * count
    other = BOTH if config.integers("hybrid_layer_ids") is not None else FULL
    return [other if i in attention else STATE for i in range(count)]


def _attention_layers(config: Fields, count: int) -> set[int] | None:
    """Numbers of the attention layers, the others having states."""
    for name in ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids"):
        indices = config.integers(name)
        if indices is not None:
            return set(indices)
    types = config.integers("attn_type_list")
    if types is not None:
        return {i for i, kind in enumerate(types) if kind == 1}
    linear = config.inner("linear_attn_config")
    if linear is not None:
        # Numbered from 1.
        return {i - 1 for i in linear.integers("full_attn_layers") or []}
    period = config.integer("attn_layer_period", default=0)
    if period:
        offset = config.integer("attn_layer_offset", default=0)
        return {i for i in range(count) if i % period == offset}
    interval = config.integer("full_attention_interval", default=0)
    if interval:
        return {i for i in range(count) if (i + 1) % interval == 0}
    return None


def _without_sharing(kinds: list[LayerKind], shared: int) -> list[LayerKind]:
    """The last `shared` layers read the KV of earlier ones and own none."""
    kept = len(kinds) - min(shared, len(kinds))
    return kinds[:kept] + [LayerKind(state=kind.state) for kind in kinds[kept:]]
