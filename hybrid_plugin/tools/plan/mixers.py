# SPDX-License-Identifier: Apache-2.0
"""What one layer of each kind of mixer holds per token or per sequence.

Shapes as in the papers and in the engines' state calculators (vLLM's
`MambaStateShapeCalculator`): a causal convolution over `width` channels keeps
the last `kernel - 1` inputs of each; a recurrence keeps a matrix per head.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_plugin.config import ConfigError
from hybrid_plugin.tools.plan.fields import Fields


@dataclass(frozen=True, slots=True)
class Mixer:
    """Size and cost of one layer's mixer on one rank."""

    kind: str
    bytes: int
    """Of KV per token, or of states per sequence."""
    formula: str
    parameters: float
    pair_flops: float = 0.0
    """Of attention: cost of one token's look at another."""
    record_bytes: int = 0
    """Of states: what a record of one verified token takes; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one number of each sort, and the ranks that share a layer."""

    kv: float
    conv: int
    state: int
    ranks: int = 1


def attention(config: Fields, widths: Widths) -> Mixer:
    """Attention, with all heads' keys and values or with one latent (MLA)."""
    hidden = config.integer("hidden_size")
    heads = _share(config.integer("num_attention_heads"), widths.ranks)
    if "kv_lora_rank" in config:
        return _latent_attention(config, widths, hidden, heads)
    kv_heads = _share(
        config.integer("num_key_value_heads", default=heads * widths.ranks),
        widths.ranks,
    )
    default = hidden // max(heads * widths.ranks, 1)
    head = config.integer("head_dim", "attention_head_dim", default=default)
    return Mixer(
        kind="attention",
        bytes=int(2 * kv_heads * head * widths.kv),
        formula=f"2 (K, V) x {kv_heads} heads x {head} x {widths.kv:g} bytes",
        parameters=hidden * head * (2 * heads + 2 * kv_heads),
        pair_flops=4.0 * heads * head,
    )


def _latent_attention(config: Fields, widths: Widths, hidden: int, heads: int) -> Mixer:
    latent = config.integer("kv_lora_rank")
    rope = config.integer("qk_rope_head_dim", default=0)
    nope = config.integer("qk_nope_head_dim", default=128)
    value = config.integer("v_head_dim", default=128)
    return Mixer(
        kind="latent attention",
        bytes=int((latent + rope) * widths.kv),
        formula=f"({latent} latent + {rope} rotary) x {widths.kv:g} bytes",
        parameters=hidden * (latent + rope + heads * (nope + rope + value))
        + latent * heads * (nope + value),
        pair_flops=2.0 * heads * (2 * latent + rope),
    )


def state(config: Fields, widths: Widths) -> Mixer:
    """The state mixer that the configuration describes.

    Raises:
        ConfigError: if it describes none that is known.
    """
    hidden = config.integer("hidden_size")
    if "linear_num_value_heads" in config:
        return _gated_delta(config, widths, hidden)
    if config.inner("linear_attn_config") is not None or "linear_num_heads" in config:
        return _kimi_delta(config, widths, hidden)
    if "conv_L_cache" in config:
        return _short_convolution(config, widths, hidden)
    if config.text("model_type").startswith("minimax"):
        return _lightning(config, widths, hidden)
    if any(name in config for name in _MAMBA2_HEADS):
        return _mamba2(config, widths, hidden)
    if "mamba_d_state" in config or "state_size" in config:
        return _mamba1(config, widths, hidden)
    raise ConfigError(
        f"{config.source} has state layers of a kind that is unknown; known are "
        "Mamba, Mamba-2, gated delta net, KDA, lightning attention and short "
        "convolution."
    )


_MAMBA2_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")


def _gated_delta(config: Fields, widths: Widths, hidden: int) -> Mixer:
    keys = _share(config.integer("linear_num_key_heads"), widths.ranks)
    values = _share(config.integer("linear_num_value_heads"), widths.ranks)
    key = config.integer("linear_key_head_dim")
    value = config.integer("linear_value_head_dim")
    width = 2 * keys * key + values * value
    conv = _convolution(config.integer("linear_conv_kernel_dim"), width, widths)
    matrix = _matrix(values, value, key, widths)
    parameters = hidden * (2 * keys * key + 3 * values * value + 2 * values)
    record = _record(keys * key + values * (value + 1), width, widths)
    return _states("gated delta net", [conv, matrix], parameters, record)


def _kimi_delta(config: Fields, widths: Widths, hidden: int) -> Mixer:
    inner = config.inner("linear_attn_config") or config
    heads = _share(inner.integer("num_heads", "linear_num_heads"), widths.ranks)
    head = inner.integer("head_dim", "linear_head_dim")
    kernel = inner.integer("short_conv_kernel_size", "linear_conv_kernel_dim")
    conv = _convolution(kernel, 3 * heads * head, widths)
    return _states(
        "Kimi delta attention",
        [conv, _matrix(heads, head, head, widths)],
        4.0 * hidden * heads * head + 4.0 * hidden * head,
        _record(3 * heads * head, 3 * heads * head, widths),
    )


def _short_convolution(config: Fields, widths: Widths, hidden: int) -> Mixer:
    width = _share(hidden, widths.ranks)
    conv = _convolution(config.integer("conv_L_cache"), width, widths)
    return _states("short convolution", [conv], 4.0 * hidden * width)


def _lightning(config: Fields, widths: Widths, hidden: int) -> Mixer:
    all_heads = config.integer("num_attention_heads")
    heads = _share(all_heads, widths.ranks)
    head = config.integer("head_dim", default=hidden // max(all_heads, 1))
    matrix = _matrix(heads, head, head, widths)
    return _states("lightning attention", [matrix], 5.0 * hidden * heads * head)


def _mamba2(config: Fields, widths: Widths, hidden: int) -> Mixer:
    all_heads = config.integer(*_MAMBA2_HEADS)
    head = config.integer("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    size = config.integer("mamba_d_state", "ssm_state_size", "state_size")
    groups = config.integer("mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    inner = config.integer("mamba_d_ssm", default=all_heads * head)
    kernel = config.integer("mamba_d_conv", "conv_kernel")
    # A rank needs the groups of all its heads.
    groups = groups if groups % widths.ranks == 0 else widths.ranks
    width = _share(inner + 2 * groups * size, widths.ranks)
    heads = _share(all_heads, widths.ranks)
    parameters = hidden * (3 * inner + 2 * groups * size + all_heads) / widths.ranks
    return _states(
        "Mamba-2",
        [_convolution(kernel, width, widths), _matrix(heads, head, size, widths)],
        parameters,
        _record(
            _share(groups, widths.ranks) * size + heads * (head + 1), width, widths
        ),
    )


def _mamba1(config: Fields, widths: Widths, hidden: int) -> Mixer:
    expand = config.integer("mamba_expand", "expand", default=2)
    inner = _share(expand * hidden, widths.ranks)
    size = config.integer("mamba_d_state", "state_size")
    kernel = config.integer("mamba_d_conv", "conv_kernel")
    matrix = _matrix(1, inner, size, widths)
    return _states(
        "Mamba", [_convolution(kernel, inner, widths), matrix], 3.0 * hidden * inner
    )


def _convolution(kernel: int, width: int, widths: Widths) -> tuple[int, str]:
    taps = max(kernel - 1, 0)
    return taps * width * widths.conv, f"{taps} x {width} x {widths.conv} bytes"


def _matrix(heads: int, rows: int, columns: int, widths: Widths) -> tuple[int, str]:
    size = heads * rows * columns * widths.state
    return size, f"{heads} x {rows} x {columns} x {widths.state} bytes"


def _record(numbers: int, channels: int, widths: Widths) -> int:
    """What a token does to a state, in float32, and the convolution's input."""
    return 4 * numbers + channels * widths.conv


def _states(
    kind: str, parts: list[tuple[int, str]], parameters: float, record: int = 0
) -> Mixer:
    total = sum(size for size, _ in parts)
    formula = " + ".join(text for _, text in parts)
    return Mixer(kind, total, formula, parameters, record_bytes=record)


def _share(count: int, ranks: int) -> int:
    """One rank's part, never less than one."""
    return max(-(-count // ranks), 1)
