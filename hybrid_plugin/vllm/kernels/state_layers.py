# SPDX-License-Identifier: Apache-2.0
"""A worker's state layers are taken over by our kernels, as far as the option says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from hybrid_plugin.config import ConfigError
from hybrid_plugin.engine.kernel_choice import Mixer
from hybrid_plugin.vllm import activation, elastic, patches, rings
from hybrid_plugin.vllm.kernels import prefill_graphs, records
from hybrid_plugin.vllm.kernels.layers import StateLayers, mixer_of
from hybrid_plugin.vllm.speculation import serving

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


def take_over(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]) -> StateLayers:
    """Find the state layers and hook those that our kernels run.

    Args:
        vllm_config: of a worker that has loaded the model's weights.
        specs: of the model's layers.

    Raises:
        ConfigError: if ours are demanded for a layer that they cannot run, their hook
            points are gone, or `prefill_graphs` or `deterministic` cannot be had.
    """
    every = vllm_config.compilation_config.static_forward_context
    states = {name: s for name, s in specs.items() if isinstance(s, MambaSpec)}
    layers = {name: every[name] for name in states}
    options = activation.read_options(vllm_config)
    device_type = elastic.device_type()
    rows = 0
    if serving.replays(vllm_config, options, partial(mixer_of, layers.values())):
        rows = _recorded_rows(vllm_config, states.values(), device_type)
    found = StateLayers(
        layers,
        options.wanted_kernels,
        device_type,
        drafts=vllm_config.num_speculative_tokens,
        recorded_rows=rows,
        round_states=options.is_deterministic,
        has_others=rings.are_among(specs),
    )
    if options.is_deterministic and Mixer.MODEL_CLASS in found.mixers:
        raise ConfigError(
            "deterministic was not tested with model classes of hybrid-plugin; leave "
            "it out."
        )
    found.wants_graphs = prefill_graphs.are_wanted(
        options.wants_prefill_graphs, vllm_config, found, device_type
    )
    if found.mixers:
        patches.patch_kernels(found.mixers, drafts=found.drafts > 0)
        if found.wants_graphs is not False:
            patches.patch_prefill_graphs(found.mixers)
        found.hang()
        activation.logger.info("%s", found.describe())
    if found.records is not None:
        patches.patch_accepted(v2=vllm_config.use_v2_model_runner)
        activation.logger.info(
            "hybrid-plugin: %.1f MiB beside the pools record drafts.",
            found.record_bytes / 2**20,
        )
    return found


def _recorded_rows(
    vllm_config: VllmConfig, states: Iterable[MambaSpec], device_type: str
) -> int:
    weights = torch.cuda.memory_allocated() if device_type == "cuda" else 0
    return records.most_rows(
        vllm_config,
        states,
        elastic.most_cache_bytes(vllm_config, weights),
        prefill_graphs.limits_of(vllm_config, prefill_graphs.LONGEST).sequences,
    )
