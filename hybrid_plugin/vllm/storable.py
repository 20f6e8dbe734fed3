# SPDX-License-Identifier: Apache-2.0
"""Engines whose content cannot be kept in files, or not yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid_plugin.engine.bundle_identity import DUMMY, UNNAMED_DUMMIES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from hybrid_plugin.config import DiskOptions


def obstacles(vllm_config: VllmConfig, disk: DiskOptions) -> Iterator[str]:
    """Sentences about what makes files say other things than they seem to.

    Args:
        vllm_config: of the engine.
        disk: the option.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.data_parallel_size > 1:
        yield (
            "disk serves one replica, and with data parallelism there are several: "
            "leave it out, or start a server for each with a folder of its own."
        )
    if parallel.nnodes > 1:
        yield "disk serves one machine, and the ranks are on several: leave it out."
    if callable(model.hf_overrides):
        yield (
            "disk cannot tell what a function makes of a model: leave it or the "
            "function for hf_overrides out."
        )
    multimodal = model.multimodal_config
    if multimodal is not None and multimodal.mm_processor_cache_gb == 0:
        yield (
            "disk needs images that are named by their content, which "
            "--mm-processor-cache-gb 0 switches off: leave one of them out."
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield (
            "disk needs KV scales that are equal after a restart: leave it or "
            "--calculate-kv-scales out."
        )
    if vllm_config.load_config.load_format == DUMMY and disk.weights is None:
        yield UNNAMED_DUMMIES
