# SPDX-License-Identifier: Apache-2.0
"""With which drafts, and which models, speculative decoding is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from hybrid_plugin.config import HybridConfig
from hybrid_plugin.engine.kernel_choice import Mixer, are_recorded

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

_METHODS = frozenset(
    {
        "custom_class",
        "dflash",
        "draft_model",
        "eagle",
        "eagle3",
        "medusa",
        "mlp_speculator",
        "mtp",
        "ngram",
        "ngram_gpu",
        "suffix",
    }
)
"""Ways to propose a chain of drafts that keep no state but pages of KV."""

_FEWER_ON_V1 = frozenset({"draft_model", "eagle", "eagle3", "mtp", "ngram"})
"""Proposers that the V1 model runner can ask for fewer drafts than usual.

The others propose what they find, or assert the usual number.
"""

_VERIFIED = frozenset(
    {
        MambaAttentionBackendEnum.GDN_ATTN,
        MambaAttentionBackendEnum.MAMBA2,
        MambaAttentionBackendEnum.SHORT_CONV,
    }
)
"""State layers that vLLM has verify drafts, whatever model they are of.

Not linear attention: its V2 model runner tells none of those layers what was accepted,
its V1 runner not those of MiniMax-Text-01.
"""


def obstacles(vllm_config: VllmConfig, options: HybridConfig) -> Iterator[str]:
    """Sentences about drafts that the plugin does not serve, with the way out."""
    drafting = vllm_config.speculative_config
    if drafting is None:
        return
    if drafting.method not in _METHODS:
        yield (
            f"speculative decoding by {drafting.method!r} is not supported yet; choose "
            "another method, or drop --speculative-config."
        )
    draft = drafting.draft_model_config
    if drafting.method == "draft_model" and draft is not None and draft.is_hybrid:
        yield (
            "draft models with state layers are not supported yet; choose another one, "
            "or drop --speculative-config."
        )
    if draft is not None and _has_windows(draft):
        yield (
            "draft models with sliding windows are not supported yet; choose another "
            "one, or drop --speculative-config."
        )
    demands_replay = options.draft_states == "replay"
    if demands_replay and _has_idle_ranks(vllm_config):
        yield (
            "draft_states is replay, which is not served with data parallelism yet; "
            "leave it out, or drop --data-parallel-size."
        )
    if options.is_deterministic:
        yield (
            "deterministic is not served with speculative decoding; drop "
            "--speculative-config."
        )
    asks_for_ours = options.kernels == "ours" or demands_replay
    if asks_for_ours and _chooses_graphs_by_shape(vllm_config):
        yield (
            "vLLM's V1 model runner replays a graph of verified drafts for the end of "
            "a prompt that is as long, and our kernels would read the tables of "
            "another pass; leave kernels and draft_states out, or give "
            "--enforce-eager."
        )


def _has_idle_ranks(vllm_config: VllmConfig) -> bool:
    """Whether a rank runs passes of nothing while another one has requests."""
    return bool(vllm_config.parallel_config.data_parallel_size > 1)


def _chooses_graphs_by_shape(vllm_config: VllmConfig) -> bool:
    """Whether a pass may be a graph's that was captured for rows of another kind."""
    from vllm.platforms import current_platform

    return (
        not current_platform.is_cpu()
        and not vllm_config.use_v2_model_runner
        and not vllm_config.model_config.enforce_eager
    )


def replays(
    vllm_config: VllmConfig,
    options: HybridConfig,
    find_mixer: Callable[[], Mixer | None],
) -> bool:
    """Whether drafts leave a record of what they do to a state, and no states.

    Args:
        vllm_config: of a worker.
        options: of the plugin.
        find_mixer: as for `are_recorded`.
    """
    if vllm_config.speculative_config is None:
        return False
    if options.draft_states == "auto" and (
        _has_idle_ranks(vllm_config) or _chooses_graphs_by_shape(vllm_config)
    ):
        return False
    return are_recorded(options, find_mixer, "vllm")


def obstacle_of_layers(
    vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]
) -> str | None:
    """Why a built model's state layers cannot verify drafts, a sentence; None if so.

    Args:
        vllm_config: of the engine.
        specs: of the model's layers.
    """
    if vllm_config.speculative_config is None:
        return None
    from vllm.platforms import current_platform

    served = _VERIFIED
    if current_platform.is_cpu():
        served -= {MambaAttentionBackendEnum.SHORT_CONV}
    for layer, spec in specs.items():
        if isinstance(spec, MambaSpec) and spec.mamba_type not in served:
            return (
                f"vLLM does not verify drafts in layer {layer}, of the kind "
                f"{spec.mamba_type.name}; drop --speculative-config."
            )
    return None


def takes_fewer_drafts(vllm_config: VllmConfig) -> bool:
    """Whether who proposes drafts can be asked for fewer of them in a step.

    Schedulers of data-parallel ranks decide apart, and their drafters must not: they
    run collectives together.
    """
    drafting = vllm_config.speculative_config
    if drafting is None or vllm_config.parallel_config.data_parallel_size > 1:
        return False
    return bool(vllm_config.use_v2_model_runner) or drafting.method in _FEWER_ON_V1


def _has_windows(model: ModelConfig) -> bool:
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or ()
    named = {"sliding_attention", "chunked_attention"} & set(kinds)
    of_blocks = (getattr(text, "dflash_config", None) or {}).get("use_swa")
    return bool(named or of_blocks) or model.get_sliding_window() is not None
