# SPDX-License-Identifier: Apache-2.0
"""Engines whose content means nothing in files or to peers, or not yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid_plugin.config import DiskOptions
from hybrid_plugin.engine.bundle_identity import DUMMY, NamesWeights, unnamed_dummies

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def obstacles(vllm_config: VllmConfig, given: NamesWeights) -> Iterator[str]:
    """Sentences about what makes content say other things than it seems to.

    Args:
        vllm_config: of the engine.
        given: the option.
    """
    option = given.option
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.data_parallel_size > 1:
        own = " with a folder of its own" if option == DiskOptions.option else ""
        yield (
            f"{option} serves one replica, and with data parallelism there are "
            f"several: leave it out, or start a server for each{own}."
        )
    if parallel.nnodes > 1:
        yield (
            f"{option} serves one machine, and the ranks are on several: leave it out."
        )
    if callable(model.hf_overrides):
        yield (
            f"{option} cannot tell what a function makes of a model: leave it or the "
            "function for hf_overrides out."
        )
    multimodal = model.multimodal_config
    if multimodal is not None and multimodal.mm_processor_cache_gb == 0:
        yield (
            f"{option} needs images that are named by their content, which "
            "--mm-processor-cache-gb 0 switches off: leave one of them out."
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield (
            f"{option} needs KV scales that are equal everywhere: leave it or "
            "--calculate-kv-scales out."
        )
    if vllm_config.load_config.load_format == DUMMY and given.weights is None:
        yield unnamed_dummies(option)
