# SPDX-License-Identifier: Apache-2.0
"""The convolution inputs of a model's layers, as vLLM keeps them for drafts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from hybrid_plugin.device.verified import RollingWindows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


def rolling_windows(
    vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], ours: Collection[str]
) -> RollingWindows:
    """The windows of all layers with a convolution that vLLM's kernels run.

    Args:
        vllm_config: of a worker whose cache is allocated.
        specs: of the model's layers.
        ours: layers that our kernels run: every column has its own inputs there.
    """
    layers = vllm_config.compilation_config.static_forward_context
    states = [
        layers[name].kv_cache[0]
        for name, spec in specs.items()
        if name not in ours
        and isinstance(spec, MambaSpec)
        and spec.mamba_type != MambaAttentionBackendEnum.LINEAR
    ]
    if is_conv_state_dim_first():
        states = [state.transpose(1, 2) for state in states]
    if not states:
        return RollingWindows((), 0)
    width = states[0].shape[1] - vllm_config.num_speculative_tokens
    return RollingWindows(states, width)
